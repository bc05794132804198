"""A step's work as times on one SM: what forecasts of it on any share have in common.

Knows nothing about shares, clocks or neighbours. Per operator, all its executions together: C seconds of arithmetic and
S of loads on one SM, D seconds of the device's memory, each raised to the exponent with which `roofs` joins them.
"""

from typing import NamedTuple

from bulletserve.core.operators import Operator, StepShape, operators
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.parameters import Parameters

Tiled = tuple[tuple[int, float], ...]


class WorkRow(NamedTuple):
    """One operator or several alike: C^p, S^k, D^k. Of products `m` is their rows (0 where it is none) and `tiled`
    each one's columns and share of C, over which the loss in waves is averaged."""

    compute: float
    loads: float
    memory: float
    m: int
    tiled: Tiled


class Work(NamedTuple):
    """One step. `launch_s` and `least_s`: its launch constants and the host's time, below which it cannot fall.

    `sm_j` is the energy that falls with the clock, `memory_j` that which does not; `moved_s` the time of all bytes at
    the device's bandwidth.
    """

    rows: tuple[WorkRow, ...]
    launch_s: float
    least_s: float
    sm_j: float
    memory_j: float
    moved_s: float


def work(constants: Parameters, shape: ModelShape, step: StepShape, dtype_bytes: int = 2) -> Work:
    """What `step` of a model of `shape` is on a device with these constants."""
    groups: dict[tuple[str, int], list[Operator]] = {}
    flops = moved = 0
    for each in operators(shape, step, dtype_bytes):
        groups.setdefault(_group(each), []).append(each)
        moved += each.bytes * each.count
        flops += each.flops * each.count
    rows = tuple(_row(constants, found) for found in groups.values())
    launch_s, least_s = _launch(constants, step)
    return Work(
        rows=rows,
        launch_s=launch_s,
        least_s=least_s,
        sm_j=flops * constants.flop_j,
        memory_j=moved * constants.byte_j,
        moved_s=moved / constants.device_bytes,
    )


def _group(each: Operator) -> tuple[str, int]:
    """Operators that are limited alike make one row: a layer's products, which have their rows in common and so nearly
    the same flops a byte; all that is bytes only."""
    if each.m:
        return "products", each.m if each.count > 1 else -each.m
    return (each.name if each.flops else "elementwise"), 0


def _row(constants: Parameters, alike: list[Operator]) -> WorkRow:
    p, k, first = constants.overlap, constants.knee, alike[0]
    flops = sum(each.flops * each.count for each in alike)
    moved = sum(each.bytes * each.count for each in alike)
    rate = constants.matmul_flops if first.m else constants.attention_flops
    per_sm = constants.attention_bytes if first.name == "decode_attention" else constants.stream_bytes
    tiled = tuple((each.n, each.flops * each.count / flops) for each in alike) if first.m else ()
    powers = (flops / rate) ** p, (moved / per_sm) ** k, (moved / constants.device_bytes) ** k
    return WorkRow(*powers, first.m, tiled)


def _launch(constants: Parameters, step: StepShape) -> tuple[float, float]:
    layer_s = constants.layer_s + (constants.decode_layer_s if step.decode_rows else 0.0)
    launch_s = step.layers * layer_s + (constants.tail_s if step.sampled else 0.0)
    eager = step.prefill_tokens and step.rows > constants.graph_tokens
    return launch_s, step.layers * constants.host_layer_s if eager else 0.0
