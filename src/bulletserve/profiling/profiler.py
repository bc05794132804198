"""Measures points on an engine's executor: each becomes the samples that a fit takes.

Knows nothing about policies or what is fitted. A step alone is one of many like it, two deep on its lane; side by side
both lanes are kept busy for long enough that the phases of a prefill (products, attention) average out.
"""

from dataclasses import dataclass
from math import isfinite

from bulletserve.core.errors import EngineError
from bulletserve.core.samples import Sample
from bulletserve.profiling.driver import Driver, Run
from bulletserve.profiling.engine_sources import EngineSources
from bulletserve.profiling.points import Point
from bulletserve.profiling.sources import Source
from bulletserve.profiling.traces import TooFewSteps


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a point is run: `seconds`, or with `shortest_s` only as long as the spread of its steps wants, at least
    `steps` decode or mixed steps, or `prompts` batches of prompts."""

    warm_s: float = 0.2
    seconds: float = 0.5
    shortest_s: float | None = None
    steps: int = 8
    prompts: int = 3

    def least(self, point: Point) -> int:
        """Whole steps or batches that a lane must see."""
        return self.steps if point.kind in ("decode", "mixed") else self.prompts


POWER_PACE = Pace(warm_s=0.8, seconds=1.2)
"""For the power run: the driver's energy counter and the clock's control need time."""


Samples = tuple[Sample, ...]
"""Of one point: the decode lane's behind the prefill lane's where both run."""


def faster(one: Samples | None, other: Samples) -> Samples:
    """The better of two runs of a point, lane by lane: whatever else the machine does only makes steps slower."""
    if one is None:
        return other
    return tuple(min(pair, key=lambda sample: sample.seconds) for pair in zip(one, other, strict=True))


class Profiler:
    """Runs points on a `driver` with sources of the engine that it drives."""

    def __init__(self, driver: Driver, sources: EngineSources) -> None:
        self._driver = driver
        self._sources = sources

    def measure(self, point: Point, pace: Pace) -> Samples:
        """Run one point.

        Raises `TooFewSteps` where too few ended, `EngineError` when one failed.
        """
        try:
            run = self._driver.run(
                *self._lanes(point),
                seconds=pace.seconds,
                shortest_s=pace.shortest_s,
                least=pace.least(point),
                warm_s=pace.warm_s,
            )
        except TooFewSteps:
            raise
        except RuntimeError as error:
            raise EngineError(f"{point.describe()}: {error}") from error
        samples = self._samples(point, run)
        if not all(isfinite(sample.seconds) for sample in samples):
            raise TooFewSteps("fewer than two whole prompts were seen")
        return samples

    def _lanes(self, point: Point) -> list[Source]:
        sources, partition = self._sources, point.partition
        pool = sources.pool()
        prompts, rows = point.prompts, point.rows
        lanes: list[Source] = []
        if point.kind == "mixed" and prompts is not None and rows is not None:
            decode = sources.decode(rows.rows, rows.context, partition.prefill_sms, pool)
            return [sources.mixed(decode, prompts.tokens, prompts.new, pool, cached=prompts.cached)]
        if prompts is not None:
            first = rows.rows if rows else 0
            more = {"first_seat": first, "cached": prompts.cached, "count": prompts.count}
            lanes.append(sources.prompts(prompts.tokens, partition.prefill_sms, pool, **more))
        if rows is not None:
            lanes.append(sources.decode(rows.rows, rows.context, partition.decode_sms, pool))
        return lanes

    def _samples(self, point: Point, run: Run) -> Samples:
        layers = self._sources.limits.num_layers
        prefill, decode = point.prefill_step(layers), point.decode_step(layers)
        watts, clock_mhz = (value if isfinite(value) else None for value in (run.watts, run.mhz))
        samples: list[Sample] = []
        if prefill is not None:
            lane = run.lanes[0]
            ms = lane.period_ms if point.kind == "mixed" else lane.prompt_ms
            samples.append(Sample(prefill, point.partition, decode, ms / 1e3, watts, clock_mhz))
        if decode is not None:
            lane = run.lanes[-1]
            samples.append(Sample(decode, point.partition, prefill, lane.period_ms / 1e3, watts, clock_mhz))
        return tuple(samples)
