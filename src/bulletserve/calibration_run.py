"""A run of a calibration: measures a design on an engine. What is made of the samples: `calibration_fit`.

Knows nothing about fits, files or terminals. The points are run in random order, so that a drift of the machine is no
property of one kind of step, but kinds take turns: a run that is cut short has seen of each its part.
"""

import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, Any

from bulletserve.commands.gpu_report import driver_version, installed
from bulletserve.core.errors import EngineError
from bulletserve.machine import code_commit, device_name
from bulletserve.measurements import Measurements
from bulletserve.profiling.cache_contents import fill_cache
from bulletserve.profiling.design import Design, make_design, power_points
from bulletserve.profiling.driver import Driver
from bulletserve.profiling.engine_sources import EngineSources
from bulletserve.profiling.meter import Meter
from bulletserve.profiling.points import Point
from bulletserve.profiling.profiler import POWER_PACE, Pace, Profiler, Samples, faster
from bulletserve.profiling.scope import Scope, cpu_scope, gpu_scope
from bulletserve.profiling.traces import TooFewSteps

if TYPE_CHECKING:
    from bulletserve.compose import Engine

STEADY, MOST_ROUNDS = 1.1, 5
"""Where points are run more than once, those whose two best runs are further apart are run again, up to so often."""

KEPT_S = 10.0
"""How often what is measured so far is given away."""

CPU_CLOCK_MHZ = 1000.0
"""Stands for a clock that is not known: forecasts use ratios to it only."""


@dataclass(frozen=True)
class CalibrationPlan:
    """What is going to be measured on `engine`, and with which meter (None: a device without counters)."""

    engine: "Engine"
    scope: Scope
    design: Design
    power: tuple[Point, ...]
    meter: Meter | None
    device_kind: str
    seed: int

    @property
    def runs(self) -> int:
        """Runs in all."""
        return self.scope.rounds * (len(self.design.fit) + len(self.design.held_out)) + len(self.power)


def make_plan(
    engine: "Engine", device_kind: str, *, quick: bool = False, brief: bool = False, seed: int = 0
) -> CalibrationPlan:
    """The plan for an idle engine on `device_kind` ("cuda" or "cpu"); `quick`: fewer points; `brief`, on a CPU: those
    of a first start. Raises `ValueError`."""
    limits, length = engine.limits, engine.info.max_model_len
    meter: Meter | None = None
    if device_kind == "cuda":
        scope = gpu_scope(limits, length, quick=quick)
        meter = Meter(uuid=gpu_uuid())
    else:
        scope = cpu_scope(limits, length, engine.checkpoint.shape.parameters, quick=quick, brief=brief)
    design = make_design(limits.lattice, scope.reach, scope.fit, scope.held_out, seed)
    counted = meter is not None and not meter.why_not
    power = power_points(limits.lattice, scope.reach) if counted else ()
    return CalibrationPlan(engine, scope, design, power, meter, device_kind, seed)


def measure(
    plan: CalibrationPlan,
    told: Callable[[Point], None] = lambda _: None,
    *,
    until_s: float = inf,
    kept: Callable[[Measurements], None] = lambda _: None,
) -> Measurements:
    """Run all points, or those for which there is time `until_s` (of `time.monotonic`).

    `told` hears of each that begins, `kept` every few seconds, and before an exception leaves, of all that is measured
    so far. A step that fails ends the run: a broken device has no more to say, and what it said before is not lost
    (`Measurements.cut_short`).
    """
    engine, scope = plan.engine, plan.scope
    cache = getattr(engine.executor, "cache", None)
    if cache is not None:
        fill_cache(cache.layers)
    sources = EngineSources(engine.limits, engine.info.vocab_size, scope.growth_tokens)
    profiler = Profiler(Driver(engine.executor, engine.inbox, plan.meter), sources)
    return _Measuring(plan, profiler, device_facts(plan)).run(told, until_s, kept)


def in_turns(design: Design, rng: random.Random) -> list[Point]:
    """All points of `design` in random order, those of each kind, fitted or held out, spread over all of it."""
    kinds: dict[tuple[bool, str], list[Point]] = {}
    for held, points in enumerate((design.fit, design.held_out)):
        for point in points:
            kinds.setdefault((bool(held), point.kind), []).append(point)
    placed = [
        ((at + rng.random()) / len(points), number, point)
        for number, points in enumerate(kinds.values())
        for at, point in enumerate(rng.sample(points, len(points)))
    ]
    return [point for _, _, point in sorted(placed, key=lambda place: place[:2])]


class _Measuring:
    """The best run of each point so far, and why some have none."""

    def __init__(self, plan: CalibrationPlan, profiler: Profiler, facts: Mapping[str, Any]) -> None:
        self._plan, self._profiler, self._facts = plan, profiler, facts
        self._found: dict[Point, Samples] = {}
        self._failed: dict[Point, str] = {}
        self._took: dict[Point, list[float]] = {}
        self._cut_short = "stopped before the first run"

    def run(self, told: Callable[[Point], None], until_s: float, kept: Callable[[Measurements], None]) -> Measurements:
        """All runs, those of power first: without them the fit would know another card."""
        try:
            self._run(told, until_s, kept)
        except BaseException:
            kept(self.measurements())
            raise
        return self.measurements()

    def _run(self, told: Callable[[Point], None], until_s: float, kept: Callable[[Measurements], None]) -> None:
        plan, rng = self._plan, random.Random(self._plan.seed)
        points = [*plan.design.fit, *plan.design.held_out]
        runs = [(point, POWER_PACE) for point in plan.power]
        for _ in range(plan.scope.rounds):
            runs += [(point, plan.scope.pace) for point in in_turns(plan.design, rng)]
        with suppress(TooFewSteps, EngineError):
            self._profiler.measure(runs[-1][0], plan.scope.pace)  # cold clocks and caches
        kept_s = time.monotonic()
        at = 0
        while at < len(runs):
            self._cut_short = f"stopped after {at} of {len(runs)} runs"  # of all that is given away before the end
            now_s = time.monotonic()
            if now_s > until_s:
                self._cut_short = f"time ran out after {at} of {len(runs)} runs"
                return
            if now_s > kept_s + KEPT_S:
                kept(self.measurements())
                kept_s = now_s
            told(runs[at][0])
            try:
                self._one(*runs[at])
            except EngineError as error:
                self._cut_short = f"{error} (after {at} of {len(runs)} runs)"
                return
            at += 1
            if at == len(runs) and plan.scope.rounds > 1:
                runs += [(point, plan.scope.pace) for point in points if self._is_unsteady(point)]
        self._cut_short = ""

    def _one(self, point: Point, pace: Pace) -> None:
        try:
            samples = self._profiler.measure(point, pace)
        except (TooFewSteps, ValueError) as error:  # too little was seen, or the cache is too small for it
            self._failed[point] = str(error)
            return
        self._found[point] = faster(self._found.get(point), samples)
        self._took.setdefault(point, []).append(sum(sample.seconds for sample in samples))

    def _is_unsteady(self, point: Point) -> bool:
        """The two best runs of it disagree: whatever else the machine does had a part in both."""
        best = sorted(self._took.get(point, ()))[:2]
        return len(best) == 2 and best[1] > STEADY * best[0] and len(self._took[point]) < MOST_ROUNDS

    def measurements(self) -> Measurements:
        """All that is known."""
        plan, engine = self._plan, self._plan.engine
        fit, held_out, power = (
            tuple(sample for point in part for sample in self._found.get(point, ()))
            for part in (plan.design.fit, plan.design.held_out, plan.power)
        )
        return Measurements(
            device=self._facts,
            shape=engine.checkpoint.shape,
            dtype_bytes=dtype_bytes(engine.info.dtype),
            fit=fit,
            held_out=held_out,
            power=power,
            skipped=tuple((p.describe(), why) for p, why in self._failed.items() if p not in self._found),
            cut_short=self._cut_short,
        )


def gpu_uuid() -> str | None:
    """The GPU's, as NVML knows it, where torch tells it."""
    uuid = getattr(import_module("torch").cuda.get_device_properties(0), "uuid", None)
    return None if uuid is None else str(uuid)


def dtype_bytes(dtype: str) -> int:
    """Bytes of a number in a dtype that an engine may have."""
    return 4 if dtype == "float32" else 2


def device_facts(plan: CalibrationPlan) -> dict[str, Any]:
    """The fields of `estimator.fit.DeviceFacts`."""
    limits, meter = plan.engine.limits, plan.meter
    return {
        "name": device_name(plan.device_kind),
        "total_sms": limits.lattice.total_sms,
        "power_cap_w": meter.power_limit_w() if meter else None,
        "top_clock_mhz": (meter.max_clock_mhz() if meter else None) or CPU_CLOCK_MHZ,
        "graph_tokens": limits.captured_rows,
        "dtype": plan.engine.info.dtype,
        "source": "measured",
        "driver": (driver_version() or "") if plan.device_kind == "cuda" else "",
        "torch": installed("torch") or "",
        "commit": code_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
