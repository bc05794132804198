"""A profiler on a CPU that nobody else uses and that takes no time: steps last as long as the forecast says."""

from collections.abc import Callable
from typing import Any

import pytest

from bulletserve.calibration_run import Profiler
from bulletserve.core.samples import Sample
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.calibration import ordinary_cpu
from bulletserve.estimator.errors import exact
from bulletserve.profiling.points import Point


def measures_steadily(
    monkeypatch: pytest.MonkeyPatch,
    shape: ModelShape,
    total_sms: int,
    noise: Callable[[Point], float] = lambda point: 1.0,
) -> list[Point]:
    """From now on each run of a point takes what an ordinary CPU needs, times `noise`. The list of the runs."""
    truth, runs = ordinary_cpu("a CPU", total_sms).parameters, list[Point]()

    def measured(self: Any, point: Point, pace: Any) -> tuple[Sample, ...]:
        runs.append(point)
        steps, factor = (point.prefill_step(shape.num_layers), point.decode_step(shape.num_layers)), noise(point)
        made = [Sample(step, point.partition, beside, 1.0) for step, beside in (steps, steps[::-1]) if step is not None]
        times_s = [exact(truth, total_sms, shape, one).seconds * factor for one in made]
        return tuple(Sample(one.step, one.partition, one.alongside, s) for one, s in zip(made, times_s, strict=True))

    monkeypatch.setattr(Profiler, "measure", measured)
    return runs
