"""From what was measured to a calibration that has been judged: is it good enough to plan by?

Knows nothing about engines, files or terminals. A fit is judged by samples that it has not seen, where there are some,
and by what a plain roofline makes of the same ones: a fit that a roofline beats has followed other programs' noise.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import import_module

from bulletserve.calibrations import BEATEN, WORSE
from bulletserve.core.errors import ConfigError, EngineError
from bulletserve.core.samples import Sample
from bulletserve.estimator.calibration import NOT_ALL, Calibration
from bulletserve.estimator.errors import Predictor, by_group, exact, summary
from bulletserve.measurements import Measurements

MOST_SKIPPED = 0.25
"""A run of which more than this share gave no figure is no calibration."""

DOUBTFUL = 0.1
"""Below this median error nobody needs a word about who is better."""

ENOUGH = 3
"""Of a group of fewer points held out nothing is noted: they say little by themselves."""

Errors = Mapping[str, Mapping[str, float]]
"""Per group of samples: median, p90, count."""


def check_enough(measured: Measurements) -> None:
    """Raise `EngineError` for a run of which too little came."""
    points = len({(s.step, s.partition, s.alongside) for s in measured.fitted + measured.held_out})
    if measured.skipped and len(measured.skipped) > MOST_SKIPPED * (points + len(measured.skipped)):
        what, why = measured.skipped[0]
        raise EngineError(f"{len(measured.skipped)} points gave no figure, the first: {what}: {why}")


def fit_measured(measured: Measurements) -> Calibration:
    """The calibration, not judged; its note says so where not all was measured.

    Raises `ConfigError` where there are too few samples.
    """
    fitting = import_module("bulletserve.estimator.fit")  # brings scipy
    try:
        facts = fitting.DeviceFacts.checked(measured.device)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the samples do not say of which device they are: {error}") from error
    found: Calibration = fitting.fit(measured.fitted, facts, measured.shape, measured.dtype_bytes).calibration
    return _noted(found, f"{NOT_ALL}: {measured.cut_short}") if measured.cut_short else found


def fit_and_judge(measured: Measurements) -> tuple[Calibration, dict[str, Errors]]:
    """The calibration with its errors on the points held out, and those of every way to forecast, by name. Its note
    says where the plain ways know more: of all points together (`calibrations.is_beaten`), or of a group of them.

    Raises `ConfigError` where there are too few samples.
    """
    found = fit_measured(measured)
    regression = import_module("bulletserve.estimator.baselines").linear_regression
    ways: dict[str, Predictor] = {
        "calibrated": _calibrated(found, measured),
        "roofline": _roofline(measured),
        "linear regression": regression(measured.fitted, found.total_sms),
    }
    errors: dict[str, Errors] = {name: by_group(measured.held_out, predict) for name, predict in ways.items()}
    ours, plain = (_median(measured.held_out, ways[name]) for name in ("calibrated", "roofline"))
    if _loses(ours, plain):
        found = _noted(found, f"{BEATEN}, off by {ours:.0%} and not {plain:.0%}")
    if worse := [group for group in worse_groups(errors) if errors["calibrated"][group]["count"] >= ENOUGH]:
        found = _noted(found, f"{WORSE} or regression for {', '.join(worse)}")
    return replace(found, provenance=replace(found.provenance, holdout_errors=errors["calibrated"])), errors


def fit_in_passing(measured: Measurements) -> Calibration:
    """The calibration of a brief run, which has no points to judge by, so that its own samples do. Its note says where
    it is worse than a roofline.

    Raises `ConfigError` or `EngineError` where there are too few samples.
    """
    check_enough(measured)
    found = fit_measured(measured)
    ours, plain = (_median(measured.fitted, way) for way in (_calibrated(found, measured), _roofline(measured)))
    return _noted(found, f"{WORSE}, off by {ours:.0%} and not {plain:.0%}") if _loses(ours, plain) else found


def worse_groups(errors: Mapping[str, Errors]) -> list[str]:
    """The groups of samples of which some plain way to forecast knows more than the calibration."""
    ours, others = errors["calibrated"], [ways for name, ways in errors.items() if name != "calibrated"]
    return [
        group
        for group, found in ours.items()
        if any(_loses(found["median"], other[group]["median"]) for other in others)
    ]


def _loses(ours: float, plain: float) -> bool:
    return ours > max(DOUBTFUL, plain)


def _calibrated(calibration: Calibration, measured: Measurements) -> Predictor:
    constants, total_sms = calibration.parameters, calibration.total_sms
    return lambda sample: exact(constants, total_sms, measured.shape, sample, measured.dtype_bytes).seconds


def _roofline(measured: Measurements) -> Predictor:
    others = import_module("bulletserve.estimator.baselines")
    plain: Predictor = others.roofline(
        measured.fitted, measured.device["total_sms"], measured.shape, measured.dtype_bytes
    )
    return plain


def _median(samples: Iterable[Sample], predict: Predictor) -> float:
    errors = [abs(predict(sample) / sample.seconds - 1.0) for sample in samples]
    return summary(errors)["median"] if errors else 0.0


def _noted(calibration: Calibration, more: str) -> Calibration:
    origin = calibration.provenance
    return replace(calibration, provenance=replace(origin, note="; ".join(filter(None, (origin.note, more)))))
