"""Forecasts: how long a step takes on its share, beside what the other lane runs, and why.

Knows nothing about plans or requests. `roofs` has the time of operators, `power` the clock; here they meet, on counts
rounded to `grid`, behind a memo that results cannot show. A forecast is of a step that runs again and again beside the
other one: the clock and the contention are those of that steady state.
"""

from typing import NamedTuple

from bulletserve.core.errors import ConfigError
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.calibration import Calibration
from bulletserve.estimator.grid import above, near
from bulletserve.estimator.parameters import Parameters
from bulletserve.estimator.power import Clock, allowed_clock
from bulletserve.estimator.roofs import Curve, Roofs, WaveMemo, curve, roofs
from bulletserve.estimator.work import Work, work

_MOST_REMEMBERED = 1 << 16

_Counts = tuple[int, int, int, int, int, int, int]


class Forecast(NamedTuple):
    """How long one step will take. The six parts after `seconds` add up to it.

    `compute_s` and `memory_s`: operators at the top clock with all waves full, alone. `wave_loss_s`: SMs idle in part-
    filled waves. `contention_s`: bandwidth and speed lost to the neighbour. `clock_s`: lost to the clock that the power
    cap allows. `launch_s`: starting kernels, and waiting for the host. `joules`: the step's own energy and its
    share of the static power. `clock_ratio` and `watts` are the whole device's.
    """

    seconds: float
    compute_s: float
    memory_s: float
    wave_loss_s: float
    contention_s: float
    clock_s: float
    launch_s: float
    joules: float
    clock_ratio: float
    watts: float

    def describe(self) -> str:
        """In one line, for people: 12.3 ms = 8.0 compute + 2.0 memory + ..."""
        parts = zip(("compute", "memory", "waves", "contention", "clock", "launch"), self[1:7], strict=True)
        why = " + ".join(f"{seconds * 1e3:.2f} {name}" for name, seconds in parts)
        return f"{self.seconds * 1e3:.2f} ms = {why}; clock {self.clock_ratio:.2f}, {self.watts:.0f} W"


class Estimator:
    """Forecasts for one model on one calibrated device. Equal questions have equal answers; one thread at a time."""

    def __init__(self, calibration: Calibration, shape: ModelShape, dtype_bytes: int = 2) -> None:
        self.calibration, self.shape, self.dtype_bytes = calibration, shape, dtype_bytes
        self._constants = calibration.parameters
        self._total_sms = calibration.total_sms
        self._waves: WaveMemo = {}
        self._work: dict[_Counts, Work] = {}
        self._roofs: dict[tuple[_Counts, float], Roofs] = {}
        self._forecasts: dict[tuple[_Counts, Partition, _Counts | None], Forecast] = {}

    def predict(self, step: StepShape, partition: Partition, alongside: StepShape | None = None) -> Forecast:
        """`step` on its lane's share of `partition`, a mixed step on all SMs; `alongside` on the other lane's share.

        Raises `ConfigError` if a lane has no SMs, or if both steps are of one lane.
        """
        counts = _on_grid(step)
        beside = None if alongside is None else _on_grid(alongside)
        key = (counts, partition, beside)
        found = self._forecasts.get(key)
        if found is None:
            if len(self._forecasts) >= _MOST_REMEMBERED:
                for memo in (self._forecasts, self._roofs, self._work, self._waves):
                    memo.clear()
            found = self._forecast(counts, partition, beside)
        return found

    def _forecast(self, counts: _Counts, partition: Partition, beside: _Counts | None) -> Forecast:
        """Makes and keeps a forecast; of two steps side by side, both lanes' at once."""
        other = None if beside is None else StepShape(*beside)
        sms, other_sms = shares(StepShape(*counts), partition, other, self._total_sms)
        own = self._own(counts, sms)
        if beside is None:
            found = forecast(self._constants, own)
        else:
            # Prefill first, whichever was asked for: the last digits of a sum depend on its order.
            swapped = bool(counts[3])
            pair = own, self._own(beside, other_sms)
            both = forecast_pair(self._constants, *(pair[::-1] if swapped else pair))
            found, others = both[::-1] if swapped else both
            self._forecasts[beside, partition, counts] = others
        self._forecasts[counts, partition, beside] = found
        return found

    def _own(self, counts: _Counts, sms: float) -> Roofs:
        key = (counts, sms)
        found = self._roofs.get(key)
        if found is None:
            found = roofs(self._constants, self._work_of(counts), sms, self._total_sms, self._waves)
            self._roofs[key] = found
        return found

    def _work_of(self, counts: _Counts) -> Work:
        found = self._work.get(counts)
        if found is None:
            found = self._work[counts] = work(self._constants, self.shape, StepShape(*counts), self.dtype_bytes)
        return found


def forecast(constants: Parameters, own: Roofs) -> Forecast:
    """The forecast of a step with nothing beside it."""
    mine = curve(constants, own, None)
    return _explained(constants, own, mine, own.body_s, allowed_clock(constants, ((own, mine),)), 1.0)


def forecast_pair(constants: Parameters, one: Roofs, other: Roofs) -> tuple[Forecast, Forecast]:
    """The forecasts of two steps beside each other, each on the SMs that its roofs were made for."""
    first, second = curve(constants, one, other), curve(constants, other, one)
    clock = allowed_clock(constants, ((one, first), (other, second)))
    share = one.sms / (one.sms + other.sms)
    return (
        _explained(constants, one, first, first.body_s(1.0), clock, share),
        _explained(constants, other, second, second.body_s(1.0), clock, 1.0 - share),
    )


def _explained(
    constants: Parameters, own: Roofs, mine: Curve, at_top_s: float, clock: Clock, static_share: float
) -> Forecast:
    """`at_top_s`: time in operators at the top clock, contention included."""
    body_s = at_top_s if clock.ratio == 1.0 else mine.body_s(clock.ratio)
    seconds = max(body_s + own.launch_s, own.least_s)
    dynamic_j = own.sm_j * clock.ratio**constants.voltage + own.memory_j
    return Forecast(
        seconds=seconds,
        compute_s=own.compute_s,
        memory_s=own.memory_s,
        wave_loss_s=own.body_s - own.compute_s - own.memory_s,
        contention_s=at_top_s - own.body_s,
        clock_s=body_s - at_top_s,
        launch_s=seconds - body_s,
        joules=dynamic_j + constants.static_w * seconds * static_share,
        clock_ratio=clock.ratio,
        watts=clock.watts,
    )


def shares(step: StepShape, partition: Partition, alongside: StepShape | None, total_sms: int) -> tuple[float, float]:
    """SMs of a step and of the one beside it (0 without one).

    Where both lanes were given more than there is (a device that cannot be split), they share it in proportion.
    """
    if step.kind == "mixed":
        if alongside is not None:
            raise ConfigError("nothing runs beside a mixed step: it has both lanes")
        return float(total_sms), 0.0
    own, other = partition.prefill_sms, partition.decode_sms
    if step.kind == "decode":
        own, other = other, own
    if alongside is None:
        other = 0
    elif alongside.kind in (step.kind, "mixed"):
        raise ConfigError(f"a {alongside.kind} step cannot run beside a {step.kind} step")
    if own <= 0 or (alongside is not None and other <= 0):
        raise ConfigError(f"{partition} leaves a lane of this forecast without SMs")
    scale = min(1.0, total_sms / (own + other))
    return own * scale, other * scale


def _on_grid(step: StepShape) -> _Counts:
    return (
        above(step.prefill_tokens),
        near(step.prefill_pairs),
        near(step.prefill_context),
        above(step.decode_rows),
        near(step.decode_context),
        step.layers,
        above(step.sampled),
    )
