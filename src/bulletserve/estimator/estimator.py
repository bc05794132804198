"""Forecasts: how long a step takes on its share, beside what the other lane runs, and why.

Knows nothing about plans or requests. `roofs` has the time of operators, `power` the clock; here they meet, on counts
rounded to `grid`, behind a memo that results cannot show. A forecast is of a step that runs again and again beside the
other one: the clock and the contention are those of that steady state.
"""

from typing import NamedTuple

from bulletserve.core.errors import ConfigError
from bulletserve.core.operators import Kind, StepShape
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.calibration import Calibration
from bulletserve.estimator.grid import above, near
from bulletserve.estimator.memo import Memo
from bulletserve.estimator.parameters import Parameters
from bulletserve.estimator.power import Clock, allowed_clock
from bulletserve.estimator.roofs import ALONE, Roofs, WaveMemo, beside, roofs
from bulletserve.estimator.waves import same_tiles
from bulletserve.estimator.work import ModelWork, Work

_MOST_FORECASTS, _MOST_STEPS = 4096, 2048
"""How many are remembered: some seconds of a busy engine. Eight times as many would save a tenth of the forecasts."""

_PLACES = 64

_unchecked = tuple.__new__  # of counts that were checked before they were rounded


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


class _Asked:
    """A step on the grid: its work, and its roofs on the shares that were asked about."""

    __slots__ = ("kind", "roofs", "work")

    def __init__(self, step: StepShape, work: Work) -> None:
        self.kind, self.work = step.kind, work
        self.roofs: dict[float, Roofs] = {}


class Estimator:
    """Forecasts for one model on one calibrated device. Equal questions have equal answers; one thread at a time."""

    def __init__(self, calibration: Calibration, shape: ModelShape, dtype_bytes: int = 2) -> None:
        self.calibration, self.shape, self.dtype_bytes = calibration, shape, dtype_bytes
        self._constants = calibration.parameters
        self._total_sms = calibration.total_sms
        self._model = ModelWork(self._constants, shape, dtype_bytes)
        self._waves = WaveMemo(self._constants)
        self._asked: Memo[StepShape, _Asked] = Memo(_MOST_STEPS)
        self._forecasts: Memo[tuple[StepShape, Partition, StepShape | None], Forecast] = Memo(_MOST_FORECASTS)
        self._shares: dict[tuple[Kind, Partition, Kind | None], tuple[float, float]] = {}
        self._rounded: list[tuple[StepShape | None, StepShape | None]] = [(None, None)] * _PLACES

    def prepare(self, lattice: Lattice, max_rows: int, batch_tokens: int) -> None:
        """Compute what forecasts over `lattice` have in common, for decode steps of `max_rows` rows and prefill or
        mixed steps of `batch_tokens` tokens: milliseconds at start instead of microseconds in decisions."""
        decoding = {same_tiles(rows) for rows in range(1, max_rows + 1)}
        batches = {same_tiles(rows) for rows in range(1, batch_tokens + max_rows + 1)}
        for sms in lattice.decode_shares:
            self._waves.fill(decoding, self._model.decode_tiled, float(sms), whole=False)
        for sms in lattice.prefill_shares:
            share = sms < self._total_sms
            self._waves.fill(batches, self._model.layer_tiled, float(sms), whole=share)
            self._waves.fill(decoding, self._model.head_tiled, float(sms), whole=share)

    def predict(self, step: StepShape, partition: Partition, alongside: StepShape | None = None) -> Forecast:
        """`step` on its lane's share of `partition`, a mixed step on all SMs; `alongside` on the other lane's share.

        Raises `ConfigError` if a lane has no SMs, or if both steps are of one lane.
        """
        counts = self._on_grid(step)
        other = None if alongside is None else self._on_grid(alongside)
        found = self._forecasts.get((counts, partition, other))
        if found is None:
            found = self._forecast(counts, partition, other)
        return found

    def _forecast(self, counts: StepShape, partition: Partition, other: StepShape | None) -> Forecast:
        """Makes and keeps a forecast; of two steps side by side, both lanes' at once."""
        asked = self._of(counts)
        neighbour = None if other is None else self._of(other)
        key = asked.kind, partition, None if neighbour is None else neighbour.kind
        found = self._shares.get(key)
        if found is None:
            found = self._shares[key] = shares(counts, partition, other, self._total_sms)
        own = self._on(asked, found[0])
        if neighbour is None or other is None:
            made = forecast(self._constants, own)
        else:
            # Prefill first, whichever was asked for: the last digits of a sum depend on its order.
            if counts.decode_rows:
                others, made = forecast_pair(self._constants, self._on(neighbour, found[1]), own)
            else:
                made, others = forecast_pair(self._constants, own, self._on(neighbour, found[1]))
            self._forecasts.add((other, partition, counts), others)
        self._forecasts.add((counts, partition, other), made)
        return made

    def _on_grid(self, step: StepShape) -> StepShape:
        """A step's counts on the grid; those of some steps are at hand, each at a place of its own until another takes
        it, because decisions ask of the same steps again and again while these run."""
        place = hash(step) % _PLACES
        asked, counts = self._rounded[place]
        if counts is None or asked != step:
            counts = _on_grid(step)
            self._rounded[place] = (step, counts)
        return counts

    def _of(self, counts: StepShape) -> _Asked:
        found = self._asked.get(counts)
        if found is None:
            found = _Asked(counts, self._model.of(counts))
            self._asked.add(counts, found)
        return found

    def _on(self, asked: _Asked, sms: float) -> Roofs:
        found = asked.roofs.get(sms)
        if found is None:
            found = asked.roofs[sms] = roofs(self._constants, asked.work, sms, self._total_sms, self._waves)
        return found


def forecast(constants: Parameters, own: Roofs) -> Forecast:
    """The forecast of a step with nothing beside it."""
    return _explained(constants, own, allowed_clock(constants, ((own, ALONE),)), 0, 1.0, own.launch_s)


def forecast_pair(constants: Parameters, one: Roofs, other: Roofs) -> tuple[Forecast, Forecast]:
    """The forecasts of two steps beside each other, each on the SMs that its roofs were made for."""
    by_one, by_other = beside(constants, one), beside(constants, other)
    clock = allowed_clock(constants, ((one, by_other), (other, by_one)))
    share = one.sms / (one.sms + other.sms)
    return (
        _explained(constants, one, clock, 0, share, one.launch_s * (1.0 + by_other[-1])),
        _explained(constants, other, clock, 1, 1.0 - share, other.launch_s * (1.0 + by_one[-1])),
    )


def _explained(
    constants: Parameters, own: Roofs, clock: Clock, lane: int, static_share: float, launch_s: float
) -> Forecast:
    """The forecast of the step that is `lane` among those that `clock` was found for."""
    ratio, watts, bodies_s, tops_s = clock
    body_s, top_s = bodies_s[lane], tops_s[lane]
    seconds = max(body_s + launch_s, own.least_s)
    dynamic_j = own.sm_j * ratio**constants.voltage + own.memory_j
    return Forecast(
        seconds,
        own.compute_s,
        own.memory_s,
        own.body_s - own.compute_s - own.memory_s,
        top_s - own.body_s,
        body_s - top_s,
        seconds - body_s,
        dynamic_j + constants.static_w * seconds * static_share,
        ratio,
        watts,
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


def _on_grid(step: StepShape) -> StepShape:
    """Counts on the grid. A mixed step's rows are rounded as one count: 1020 prompt tokens beside 4 rows fill tiles of
    1024, and are not one row more."""
    tokens, pairs, read, rows, context, layers, sampled = step
    decode_rows = above(rows)
    if not tokens:
        return _unchecked(StepShape, (0, 0, 0, decode_rows, near(context), layers, above(sampled)))
    tokens = max(1, above(tokens + rows) - decode_rows)
    counts = (tokens, near(pairs), near(read), decode_rows, near(context), layers, above(sampled))
    return _unchecked(StepShape, counts)
