"""How far forecasts are from measured steps, by the kind of sample: the figures that a calibration carries.

Knows nothing about fits. The error of a sample is |forecast / measured - 1|.
"""

from collections.abc import Callable, Iterable
from statistics import median, quantiles

from bulletserve.core.samples import Sample
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.estimator import Forecast, forecast, forecast_pair, shares
from bulletserve.estimator.parameters import Parameters
from bulletserve.estimator.roofs import WaveMemo, roofs
from bulletserve.estimator.work import ModelWork

Predictor = Callable[[Sample], float]
"""Seconds of a sample's step."""

GROUPS = ("prefill alone", "decode alone", "mixed", "side by side")


def group_of(sample: Sample) -> str:
    """Which of `GROUPS` a sample belongs to."""
    if sample.alongside is not None:
        return "side by side"
    return "mixed" if sample.step.kind == "mixed" else f"{sample.step.kind} alone"


def exact(
    constants: Parameters,
    total_sms: int,
    shape: ModelShape,
    sample: Sample,
    dtype_bytes: int = 2,
    waves: WaveMemo | None = None,
) -> Forecast:
    """The forecast of a sample without the grid on which an `Estimator` rounds counts. `waves`: one for many samples of
    the same constants."""
    waves = waves or WaveMemo(constants)
    sms, other_sms = shares(sample.step, sample.partition, sample.alongside, total_sms)
    model = ModelWork(constants, shape, dtype_bytes)
    own = roofs(constants, model.of(sample.step), sms, total_sms, waves)
    if sample.alongside is None:
        return forecast(constants, own)
    return forecast_pair(constants, own, roofs(constants, model.of(sample.alongside), other_sms, total_sms, waves))[0]


def by_group(samples: Iterable[Sample], predict: Predictor) -> dict[str, dict[str, float]]:
    """{group: {"median", "p90", "count"}} of relative errors, of the groups that have samples."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        found.setdefault(group_of(sample), []).append(abs(predict(sample) / sample.seconds - 1.0))
    return {group: summary(found[group]) for group in GROUPS if group in found}


def summary(errors: list[float]) -> dict[str, float]:
    """Median, 90th percentile (the greatest of fewer than ten) and count."""
    p90 = quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 9 else max(errors)
    return {"median": median(errors), "p90": p90, "count": float(len(errors))}
