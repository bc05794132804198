"""Finds the constants of a device from measured steps.

Knows nothing about how steps were measured. Nonlinear least squares over the logarithms of the constants, on the
logarithms of forecast / measured for seconds, watts and clock, with a loss that lets single samples be wrong. First the
phases alone and mixed, with the power that they draw; then what they lose side by side; then all at once. Constants
that no sample speaks about stay near the first guess, which weak priors see to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from bulletserve.core.errors import ConfigError
from bulletserve.core.operators import operators
from bulletserve.core.partition import MOST_SMS
from bulletserve.core.samples import Sample
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.calibration import Calibration, Provenance
from bulletserve.estimator.errors import exact, group_of
from bulletserve.estimator.estimator import shares
from bulletserve.estimator.parameters import BOUNDS, Parameters, is_count
from bulletserve.estimator.roofs import WaveMemo

_SECONDS_SIGMA, _WATTS_SIGMA, _CLOCK_SIGMA = 0.02, 0.04, 0.03
"""What a good measurement is off by, as a share; residuals are counted in these."""

_OUTLIER = 2.0  # sigmas at which the loss turns from squares to distances
_STEP = 3e-4  # of a logarithm, for derivatives: far above the tolerance of the clock
_STARTS = (1.0, 0.7, 1.4)
"""Factors on the first guess of the SMs' own bandwidth, where fits started: knees have local minima."""

_MOST_STATIC = 0.8  # of the power cap

_CONTENTION = ("bandwidth_taken", "compute_slowed", "stream_slowed")
_POWER = ("static_w", "flop_j", "byte_j", "voltage")
_WIDE, _NARROW, _TIGHT = 1.5, 0.4, 0.15
_SHAPES = ("small_tile", "split_loss", "knee", "overlap", "voltage", *_CONTENTION)
"""Constants with a narrow prior: known to a third or so before anything is measured."""

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What is known of a device and engine without a fit. `power_cap_w` None: no cap, or no counter of energy.

    The rest is provenance, see `calibration.Provenance`.
    """

    name: str
    total_sms: int
    power_cap_w: float | None
    top_clock_mhz: float
    graph_tokens: int = 512
    dtype: str = ""
    source: str = "measured"
    driver: str = ""
    torch: str = ""
    commit: str = ""
    date: str = ""
    note: str = ""

    @classmethod
    def checked(cls, document: Mapping[str, Any]) -> "DeviceFacts":
        """Of a file. Raises `TypeError` or `ValueError` where a fact is missing or cannot be."""
        facts = cls(**document)
        cap_w = facts.power_cap_w
        for name, value, most in (
            ("total_sms", facts.total_sms, MOST_SMS),
            ("top_clock_mhz", facts.top_clock_mhz, 1e6),
            ("power_cap_w", 1.0 if cap_w is None else cap_w, 1e6),
        ):
            if not 0 < value <= most:
                raise ValueError(f"{name} is {value}")
        if not (is_count(facts.total_sms) and is_count(facts.graph_tokens)):
            raise ValueError(f"total_sms {facts.total_sms!r} and graph_tokens {facts.graph_tokens!r} must be whole")
        return facts


class FitResult(NamedTuple):
    """The calibration, without hold-out errors, and log(forecast / measured) seconds of each sample in order."""

    calibration: Calibration
    residuals: tuple[float, ...]


def fit(
    samples: Sequence[Sample],
    device: DeviceFacts,
    shape: ModelShape,
    dtype_bytes: int = 2,
    start: Parameters | None = None,
) -> FitResult:
    """Constants for `device` from `samples` of a model of `shape`. `start`: a first guess, such as the datasheet's.

    Raises `ConfigError` without a prefill and a decode sample that ran alone.
    """
    alone = [sample for sample in samples if sample.alongside is None]
    if not {"prefill alone", "decode alone"} <= {group_of(sample) for sample in alone}:
        raise ConfigError("a fit needs samples of prefill alone and of decode alone")
    beside = [sample for sample in samples if sample.alongside is not None]
    guess = start or first_guess(samples, device, shape, dtype_bytes)
    names = [name for name in BOUNDS if name not in _CONTENTION]
    if not any(sample.watts for sample in samples):
        names = [name for name in names if name not in _POWER]
    problem = _Problem(device.total_sms, shape, dtype_bytes, guess)
    starts = [_scaled(guess, factor) for factor in _STARTS]
    found = min((problem.solve(alone, each, names, 25) for each in starts), key=lambda one: one.cost).constants
    if beside:
        found = problem.solve(beside, found, list(_CONTENTION), 25).constants
        found = problem.solve(samples, found, names + list(_CONTENTION), 40).constants
    else:
        found = problem.solve(alone, found, names, 40).constants
    origin = Provenance(
        device.source, device.driver, device.torch, device.commit, device.date, len(samples), shape, device.dtype,
        device.note,
    )  # fmt: skip
    residuals = tuple(log(problem.seconds(found, sample) / sample.seconds) for sample in samples)
    return FitResult(Calibration(device.name, device.total_sms, found, origin), residuals)


def first_guess(samples: Sequence[Sample], device: DeviceFacts, shape: ModelShape, dtype_bytes: int = 2) -> Parameters:
    """Constants of the right size: the best rates that any sample reached, and shares of the power cap."""
    flops = bytes_s = flops_per_sm = bytes_per_sm = 0.0
    least_layer_s = inf
    for sample in samples:
        work = operators(shape, sample.step, dtype_bytes)
        sms, _ = shares(sample.step, sample.partition, sample.alongside, device.total_sms)
        rate = sum(each.flops * each.count for each in work) / sample.seconds
        moved = sum(each.bytes * each.count for each in work) / sample.seconds
        flops, flops_per_sm = max(flops, rate), max(flops_per_sm, rate / sms)
        bytes_s, bytes_per_sm = max(bytes_s, moved), max(bytes_per_sm, moved / sms)
        least_layer_s = min(least_layer_s, sample.seconds / max(1, sample.step.layers))
    cap = device.power_cap_w or inf
    scale_w = cap if cap < inf else 100.0
    sizes = {
        "matmul_flops": 1.3 * flops_per_sm,
        "attention_flops": 0.8 * flops_per_sm,
        "stream_bytes": 2.0 * bytes_per_sm,
        "attention_bytes": 1.4 * bytes_per_sm,
        "device_bytes": 1.2 * bytes_s,
        "layer_s": 0.2 * least_layer_s,
        "decode_layer_s": 0.05 * least_layer_s,
        "tail_s": 0.5 * least_layer_s,
        "host_layer_s": 2.0 * least_layer_s,
        "static_w": 0.2 * scale_w,
        "flop_j": scale_w / flops,
        "byte_j": 0.5 * scale_w / bytes_s,
    }
    inside: dict[str, Any] = {n: min(BOUNDS[n][1], max(BOUNDS[n][0], value)) for n, value in sizes.items()}
    return Parameters(
        **inside,
        power_cap_w=cap,
        top_clock_mhz=device.top_clock_mhz,
        graph_tokens=device.graph_tokens,
    )


class _Solution(NamedTuple):
    constants: Parameters
    cost: float


class _Problem:
    """Residuals in sigmas over the logarithms of chosen constants; `guess` is the centre of the priors."""

    def __init__(self, total_sms: int, shape: ModelShape, dtype_bytes: int, guess: Parameters) -> None:
        self._total_sms, self._shape, self._dtype_bytes, self._guess = total_sms, shape, dtype_bytes, guess

    def seconds(self, constants: Parameters, sample: Sample) -> float:
        """A sample's forecast."""
        return exact(constants, self._total_sms, self._shape, sample, self._dtype_bytes).seconds

    def solve(self, samples: Sequence[Sample], start: Parameters, names: list[str], rounds: int) -> _Solution:
        """The best values of the constants `names`, all others as in `start`."""
        low, high = np.log([_range(name, start) for name in names]).T
        first = np.log([getattr(start, name) for name in names])
        first = np.clip(first, low + 1e-9, high - 1e-9)

        def residuals(x: Vector) -> Vector:
            return self._residuals(samples, _with(start, names, x, low, high), names)

        found = least_squares(
            residuals, first, bounds=(low, high), loss="soft_l1", f_scale=_OUTLIER, x_scale=0.3, diff_step=_STEP,
            max_nfev=rounds, xtol=1e-6, ftol=1e-6,
        )  # fmt: skip
        return _Solution(_with(start, names, found.x, low, high), float(found.cost))

    def _residuals(self, samples: Sequence[Sample], constants: Parameters, names: list[str]) -> Vector:
        out: list[float] = []
        waves = WaveMemo(constants)
        for sample in samples:
            found = exact(constants, self._total_sms, self._shape, sample, self._dtype_bytes, waves)
            out.append(log(found.seconds / sample.seconds) / _SECONDS_SIGMA)
            if sample.watts and constants.power_cap_w < inf:
                out.append(log(found.watts / sample.watts) / _WATTS_SIGMA)
            if sample.clock_mhz and constants.power_cap_w < inf:
                out.append(log(found.clock_ratio * constants.top_clock_mhz / sample.clock_mhz) / _CLOCK_SIGMA)
        out += [log(getattr(constants, n) / getattr(self._guess, n)) / _prior_width(n) for n in names]
        return np.array(out)


def _range(name: str, start: Parameters) -> tuple[float, float]:
    """Where a constant may lie; static watts leave room below the cap."""
    low, high = BOUNDS[name]
    return low, min(high, _MOST_STATIC * start.power_cap_w) if name == "static_w" else high


def _prior_width(name: str) -> float:
    """Sigma of a constant's logarithm before the fit. The device's bandwidth is little more than the best one seen."""
    if name == "device_bytes":
        return _TIGHT
    return _NARROW if name in _SHAPES else _WIDE


def _with(start: Parameters, names: list[str], x: Vector, low: Vector, high: Vector) -> Parameters:
    """`start` with other values, inside their bounds (a step for a derivative may leave them by a rounding)."""
    inside = np.exp(np.clip(x, low + 1e-12, high - 1e-12))
    changes: dict[str, Any] = {name: float(value) for name, value in zip(names, inside, strict=True)}
    return replace(start, **changes)


def _scaled(guess: Parameters, factor: float) -> Parameters:
    """`guess` with other bandwidths of an SM, within their bounds: a slow CPU's may lie at one."""
    names = ("stream_bytes", "attention_bytes")
    sizes = {n: min(BOUNDS[n][1], max(BOUNDS[n][0], getattr(guess, n) * factor)) for n in names}
    return replace(guess, **sizes)
