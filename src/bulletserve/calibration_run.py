"""A calibration from an engine to its errors: measures a design, fits, judges by points that the fit has not seen.

Knows nothing about files or terminals. The points are run in random order, so that a drift of the machine is no
property of one kind of step.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from bulletserve.commands.gpu_report import driver_version, installed
from bulletserve.compose import Engine
from bulletserve.core.errors import EngineError
from bulletserve.core.samples import Sample
from bulletserve.core.snapshot import MAX_BATCH_TOKENS
from bulletserve.estimator.calibration import Calibration
from bulletserve.estimator.errors import Predictor, by_group, exact
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

MOST_SKIPPED = 0.25
"""A run of which more than this share gave no figure is no calibration."""

CPU_CLOCK_MHZ = 1000.0
"""Stands for a clock that is not known: forecasts use ratios to it only."""

Errors = Mapping[str, Mapping[str, float]]
"""Per group of samples: median, p90, count."""


@dataclass(frozen=True)
class CalibrationPlan:
    """What is going to be measured on `engine`, and with which meter (None: a device without counters)."""

    engine: Engine
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


def make_plan(engine: Engine, device_kind: str, *, quick: bool = False, seed: int = 0) -> CalibrationPlan:
    """The plan for an idle engine on `device_kind` ("cuda" or "cpu"); `quick`: fewer points. Raises `ValueError`."""
    limits, length = engine.limits, engine.info.max_model_len
    meter: Meter | None = None
    if device_kind == "cuda":
        scope = gpu_scope(limits, length, quick=quick)
        torch = import_module("torch")
        uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
        meter = Meter(uuid=None if uuid is None else str(uuid))
    else:
        scope = cpu_scope(limits, length, engine.checkpoint.shape.parameters, quick=quick)
    design = make_design(limits.lattice, scope.reach, scope.fit, scope.held_out, seed)
    counted = meter is not None and not meter.why_not
    power = power_points(limits.lattice, scope.reach) if counted else ()
    return CalibrationPlan(engine, scope, design, power, meter, device_kind, seed)


def measure(plan: CalibrationPlan, told: Callable[[Point], None] = lambda _: None) -> Measurements:
    """Run all points; `told` hears of each that begins.

    Raises `EngineError` when a step fails or too many points give no figure.
    """
    engine, design, scope = plan.engine, plan.design, plan.scope
    cache = getattr(engine.executor, "cache", None)
    if cache is not None:
        fill_cache(cache.layers)
    sources = EngineSources(engine.limits, engine.info.vocab_size, scope.growth_tokens)
    profiler = Profiler(Driver(engine.executor, engine.inbox, plan.meter), sources)
    points = [*design.fit, *design.held_out]
    rng = random.Random(plan.seed)
    runs = [(point, scope.pace) for _ in range(scope.rounds) for point in rng.sample(points, len(points))]
    found, skipped = _run_all(profiler, [*runs, *((point, POWER_PACE) for point in plan.power)], told)
    points += plan.power
    if len(skipped) > MOST_SKIPPED * len(points):
        point, why = next(iter(skipped.items()))
        raise EngineError(
            f"{len(skipped)} of {len(points)} points gave no figure, the first: {point.describe()}: {why}"
        )
    fit, held_out, power = (
        tuple(sample for point in part for sample in found.get(point, ()))
        for part in (design.fit, design.held_out, plan.power)
    )
    return Measurements(
        device=device_facts(plan),
        shape=engine.checkpoint.shape,
        dtype_bytes=4 if engine.info.dtype == "float32" else 2,
        fit=fit,
        held_out=held_out,
        power=power,
        skipped=tuple((point.describe(), why) for point, why in skipped.items()),
    )


def _run_all(
    profiler: Profiler, runs: Sequence[tuple[Point, Pace]], told: Callable[[Point], None]
) -> tuple[dict[Point, Samples], dict[Point, str]]:
    """The best run of each point, and why some have none."""
    found: dict[Point, Samples] = {}
    failed: dict[Point, str] = {}
    with suppress(TooFewSteps):
        profiler.measure(*runs[0])  # cold clocks and caches
    for point, pace in runs:
        told(point)
        try:
            found[point] = faster(found.get(point), profiler.measure(point, pace))
        except TooFewSteps as error:
            failed[point] = str(error)
    return found, {point: why for point, why in failed.items() if point not in found}


def device_facts(plan: CalibrationPlan) -> dict[str, Any]:
    """The fields of `estimator.fit.DeviceFacts`. On a CPU no host launches kernels, however many rows a step has."""
    limits, meter = plan.engine.limits, plan.meter
    return {
        "name": device_name(plan.device_kind),
        "total_sms": limits.lattice.total_sms,
        "power_cap_w": meter.power_limit_w() if meter else None,
        "top_clock_mhz": (meter.max_clock_mhz() if meter else None) or CPU_CLOCK_MHZ,
        "graph_tokens": limits.one_group_tokens if plan.device_kind == "cuda" else MAX_BATCH_TOKENS + limits.max_seqs,
        "source": "measured",
        "driver": (driver_version() or "") if plan.device_kind == "cuda" else "",
        "torch": installed("torch") or "",
        "commit": code_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def fit_and_judge(measured: Measurements) -> tuple[Calibration, dict[str, Errors]]:
    """The calibration with its errors on the points held out, and those of every way to forecast, by name.

    Raises `ConfigError` where there are too few samples.
    """
    fitting, others = (import_module(f"bulletserve.estimator.{name}") for name in ("fit", "baselines"))  # bring scipy
    facts, shape, dtype_bytes = fitting.DeviceFacts(**measured.device), measured.shape, measured.dtype_bytes
    found: Calibration = fitting.fit(measured.fitted, facts, shape, dtype_bytes).calibration
    ways: dict[str, Predictor] = {
        "calibrated": lambda sample: forecast_seconds(found, measured, sample),
        "roofline": others.roofline(measured.fitted, facts.total_sms, shape, dtype_bytes),
        "linear regression": others.linear_regression(measured.fitted, facts.total_sms),
    }
    errors: dict[str, Errors] = {name: by_group(measured.held_out, predict) for name, predict in ways.items()}
    return replace(found, provenance=replace(found.provenance, holdout_errors=errors["calibrated"])), errors


def forecast_seconds(calibration: Calibration, measured: Measurements, sample: Sample) -> float:
    """What `calibration` says of a sample's step."""
    shape, total = measured.shape, calibration.total_sms
    return exact(calibration.parameters, total, shape, sample, measured.dtype_bytes).seconds
