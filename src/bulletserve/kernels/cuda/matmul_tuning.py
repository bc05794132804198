"""Measures which matrix product is best where: a short run at start on the streams that will carry the work.

Knows nothing about models or lanes: it gets weights, row buckets and one place for each number of SMs. A share of the
SMs is there for the sake of its neighbour, so on a share all is measured beside a load (`neighbour`). Our kernel
can be cut in dozens of ways; a model of its time (steps of K that the busiest program does, each as long as its
arithmetic or its loads; never less than reading the weight) picks the few that are worth measuring. Each is timed
over replays of a graph that walks through different weights, because one that stays in L2 flatters every kernel,
and the candidates of a cell take turns, because the card's clock follows what ran just before.
"""

import statistics
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from bulletserve.kernels.cuda.matmul import MatmulScratch, Weight, compile_ahead, matmul
from bulletserve.kernels.cuda.matmul_choice import (
    CUBLAS,
    CUBLASLT,
    Cell,
    Choice,
    ChoiceTable,
    Stream,
    TableKey,
    schedule,
)
from bulletserve.kernels.cuda.neighbour import Neighbour

Shape = tuple[int, int]

_SM_FLOPS = 5.9e12  # one SM's dense 16-bit rate: an H200's 780 TFLOP/s over 132
_SM_BYTES_S = 100e9  # what one SM loads
_DEVICE_BYTES_S = 4.2e12
_SHARING_S = 2.5e-6  # writing unfinished sums, telling the others, adding them up
_SHARED_COST = 1.15  # of a step on a shared tile: programs far apart in K do not find each other's loads in L2
_SMALL_TILE_COST = 1.05
_STEP_S = 0.12e-6  # what a step of K costs beside loads and arithmetic
_MEASURED = 8  # of our own ways, for each cell
_REPLAYS = 4
_LEAST_TIMED_S = 150e-6  # of work in a graph
_COMPILERS = 12  # threads; the compiler leaves the GIL
_HEAVY_ROWS = 4096  # from here on a product by itself holds the card at its power limit
_NEAR_TIE = 1.03


def _way(*tile: int, swap: bool = False, streams: tuple[Stream, ...], chunks: int = 1, per_sm: int = 1) -> list[Choice]:
    block_m, block_n, block_k, warps, stages = tile
    return [
        Choice("triton", block_m, block_n, block_k, warps, stages, swap, stream, chunks, per_sm) for stream in streams
    ]


_SHARED: tuple[Stream, ...] = ("tail", "split")
# (fewest rows, most rows, ways). Each won somewhere on an H200; 256 x 128 tiles, two-tile stream-K for many rows,
# and 16 or 32 columns per tile without sharing won nowhere, or by less than the noise.
_WAYS: tuple[tuple[int, int, list[Choice]], ...] = (
    (1, 16, _way(16, 64, 256, 4, 5, swap=True, streams=_SHARED)),
    (1, 16, _way(16, 64, 128, 4, 5, swap=True, streams=_SHARED, per_sm=2)),
    (17, 32, _way(32, 64, 128, 4, 8, swap=True, streams=_SHARED)),
    (17, 32, _way(32, 64, 128, 4, 4, swap=True, streams=_SHARED, per_sm=2)),
    (17, 32, _way(32, 128, 128, 8, 5, swap=True, streams=_SHARED)),
    (33, 64, _way(64, 64, 128, 4, 6, swap=True, streams=_SHARED)),
    (33, 64, _way(64, 128, 128, 8, 4, swap=True, streams=_SHARED)),
    (33, 64, _way(64, 128, 64, 4, 4, swap=True, streams=_SHARED, per_sm=2)),
    (65, 256, _way(128, 128, 64, 8, 6, swap=True, streams=_SHARED, chunks=2)),
    (65, 512, _way(128, 256, 64, 8, 4, streams=("split",), chunks=4)),
    (65, 512, _way(128, 128, 64, 4, 3, streams=("split",), chunks=2, per_sm=2)),
    (65, 1 << 20, _way(128, 256, 64, 8, 4, streams=("none", "tail"), chunks=4)),
    (65, 1 << 20, _way(128, 128, 64, 8, 5, streams=("none",), chunks=2)),
    (65, 1 << 20, _way(128, 128, 64, 4, 3, streams=("none", "tail"), chunks=2, per_sm=2)),
)


def all_ways() -> list[Choice]:
    """Every way our kernel may be cut."""
    return [choice for _, _, ways in _WAYS for choice in ways]


def modelled_s(choice: Choice, n: int, k: int, m: int, sms: int) -> float:
    """About how long m rows of a weight [n, k] take on `sms` SMs: good for ranking, not for forecasts."""
    programs, streamed = schedule(choice, m, n, k, sms)
    tiles = -(-m // choice.block_m) * -(-n // choice.block_n)
    k_tiles = -(-k // choice.block_k)
    shared_steps = -(-streamed * k_tiles // programs)
    steps = _SHARED_COST * shared_steps + -(-(tiles - streamed) // programs) * k_tiles
    neighbours = max(1.0, programs / sms)  # programs that share an SM
    flops = 2 * choice.block_m * choice.block_n * choice.block_k
    loaded = 2 * (min(choice.block_m, m) + choice.block_n) * choice.block_k
    small = 1.0 if choice.block_m * choice.block_n > 128 * 128 else _SMALL_TILE_COST
    step = max(flops * small * neighbours / _SM_FLOPS, loaded * neighbours / _SM_BYTES_S, _STEP_S)
    return max(steps * step, 2 * n * k / _DEVICE_BYTES_S) + (_SHARING_S if streamed else 0.0)


def candidates(n: int, k: int, m: int, sms: int, most: int = _MEASURED) -> list[Choice]:
    """The few of our own ways that are worth measuring, at most `most`, the most promising first."""
    fitting = [choice for fewest, largest, ways in _WAYS if fewest <= m <= largest for choice in ways]
    different: dict[tuple[object, ...], Choice] = {}
    for choice in fitting:  # ways that divide the work alike are one
        tile = (choice.block_m, choice.block_n, choice.block_k, choice.warps, choice.stages, choice.swap, choice.per_sm)
        different.setdefault((tile, schedule(choice, m, n, k, sms)), choice)
    return sorted(different.values(), key=lambda choice: modelled_s(choice, n, k, m, sms))[:most]


@dataclass(frozen=True, slots=True)
class Place:
    """Where products are measured: a stream, and what runs beside it meanwhile."""

    stream: torch.cuda.Stream
    neighbour: Neighbour | None = None


@dataclass(frozen=True, slots=True)
class _Bench:
    """What every measurement needs."""

    weights: Mapping[Shape, Sequence[Weight]]
    dtype: torch.dtype
    float_out: Collection[Shape]
    scratch: MatmulScratch
    inputs: Mapping[int, Tensor]
    outputs: Mapping[torch.dtype, Tensor]

    def buffers(self, shape: Shape, m: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [m, k], an output as wide as the product, and [m, n] for what libraries write of a gated one."""
        n, k = shape
        memory = self.outputs[torch.float32 if shape in self.float_out else self.dtype]
        width = self.weights[shape][0].out_features
        return self.inputs[k][:m], memory[m * n :][: m * width].view(m, width), memory[: m * n].view(m, n)

    def run(self, shape: Shape, m: int, sms: int, choice: Choice, weight: Weight, *, adds: bool = False) -> None:
        """One product; `adds`: to its output."""
        x, out, wide = self.buffers(shape, m)
        matmul(x, weight, out, choice, sms, self.scratch, out if adds else None, wide)

    def adds(self, shape: Shape) -> bool:
        """Whether products of this shape may have to add to what is there."""
        return shape not in self.float_out and not self.weights[shape][0].gated

    def times_s(self, shape: Shape, m: int, sms: int, place: Place, choices: Sequence[Choice]) -> dict[Choice, float]:
        """Seconds of one product by each choice: medians over replays that take turns, there and back again.

        One choice after the other would time each at the clock that the one before left: on a card at its power
        limit a library measured first, after a heavy run, has looked a third slower than it is.
        """
        expected_s = max(2 * m * shape[0] * shape[1] / (_SM_FLOPS * sms), 2 * shape[0] * shape[1] / _DEVICE_BYTES_S)
        rounds = max(1, round(_LEAST_TIMED_S / expected_s / len(self.weights[shape])))
        samples: dict[Choice, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {choice: [] for choice in choices}
        with torch.cuda.stream(place.stream):
            graphs = [self._graph(shape, m, sms, choice, rounds) for choice in choices]
            turns = list(zip(choices, graphs, strict=True))
            with place.neighbour.running() if place.neighbour else nullcontext():
                for graph in graphs:
                    graph.replay()
                for replay in range(_REPLAYS):
                    for choice, graph in turns if replay % 2 == 0 else reversed(turns):
                        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                        begin.record()
                        graph.replay()
                        end.record()
                        samples[choice].append((begin, end))
        place.stream.synchronize()
        products = rounds * len(self.weights[shape])
        return {
            choice: statistics.median(begin.elapsed_time(end) for begin, end in pairs) / products / 1e3
            for choice, pairs in samples.items()
        }

    def _graph(self, shape: Shape, m: int, sms: int, choice: Choice, rounds: int) -> torch.cuda.CUDAGraph:
        """`rounds` walks through the weights of a shape, captured on the current stream."""
        weights = self.weights[shape]
        self.run(shape, m, sms, choice, weights[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for weight in [weight for _ in range(rounds) for weight in weights]:
                self.run(shape, m, sms, choice, weight)
        finally:
            graph.capture_end()
        return graph


def tune(
    weights: Mapping[Shape, Sequence[Weight]],
    buckets: Sequence[int],
    shares: Mapping[int, Place],
    dtype: torch.dtype,
    scratch: MatmulScratch,
    budget_s: float,
    eager_from: int,
    float_out: Collection[Shape] = (),
) -> ChoiceTable:
    """Measures every (weight shape, bucket, share) for at most about `budget_s`; what is left over stays unknown.

    `weights` holds several of each shape [N, K], more bytes than L2 together; `shares` maps a number of SMs to a
    place that has them; above `eager_from` rows nothing `capture_only` is tried; shapes in `float_out` are written
    as float32. Nothing else may run meanwhile. The table covers these shares only: `merge` joins several.
    """
    ends = time.monotonic() + budget_s
    device = scratch.counters.device
    properties = torch.cuda.get_device_properties(device)
    table = ChoiceTable(TableKey.of(properties.name, properties.multi_processor_count, str(dtype)))
    bench = _bench(weights, max(buckets), dtype, float_out, scratch)
    cells = [(shape, m, sms) for m in buckets for shape in weights for sms in shares]
    plans = {cell: candidates(*cell[0], cell[1], cell[2]) for cell in cells}
    _compile_all(bench, {(shape, choice) for (shape, _, _), plan in plans.items() for choice in plan}, residuals=False)
    for (shape, m, sms), plan in plans.items():
        if time.monotonic() > ends:
            break
        libraries = [CUBLAS] if m > eager_from else [CUBLAS, CUBLASLT]
        times = bench.times_s(shape, m, sms, shares[sms], [*libraries, *plan])
        pick = frugal if m >= _HEAVY_ROWS and shares[sms].neighbour is None else fastest
        eager = {choice: time_s for choice, time_s in times.items() if not choice.capture_only}
        table.put(*shape, m, sms, Cell(pick(times), pick(eager)))
    return table


def fastest(times: Mapping[Choice, float]) -> Choice:
    """The choice with the least of `times`, seconds."""
    return min(times, key=times.__getitem__)


def frugal(times: Mapping[Choice, float]) -> Choice:
    """The fastest of `times`, seconds; in a near tie cuBLAS.

    Ways are timed in turns, all at one clock; but at its power limit the card has a clock for each, and there cuBLAS
    did 2 % more tokens of 8192-token prompts than the winners of a race in turns (an H200, docs/LOG.md).
    """
    best = fastest(times)
    return CUBLAS if times[CUBLAS] <= _NEAR_TIE * times[best] else best


def _bench(
    weights: Mapping[Shape, Sequence[Weight]],
    rows: int,
    dtype: torch.dtype,
    float_out: Collection[Shape],
    scratch: MatmulScratch,
) -> _Bench:
    device = scratch.counters.device
    inputs = {k: torch.randn(rows, k, device=device, dtype=dtype) for k in {k for _, k in weights}}
    outputs: dict[torch.dtype, Tensor] = {}
    for out_dtype, shapes in ((dtype, set(weights) - set(float_out)), (torch.float32, set(weights) & set(float_out))):
        if shapes:
            outputs[out_dtype] = torch.empty(2 * rows * max(n for n, _ in shapes), device=device, dtype=out_dtype)
    return _Bench(weights, dtype, float_out, scratch, inputs, outputs)


def _compile_all(bench: _Bench, wanted: Iterable[tuple[Shape, Choice]], *, residuals: bool) -> None:
    def compile_one(item: tuple[Shape, Choice]) -> None:
        shape, choice = item
        x, out, _ = bench.buffers(shape, 1)
        compile_ahead(x, bench.weights[shape][0], out, choice, bench.scratch, None)
        if residuals and bench.adds(shape):
            compile_ahead(x, bench.weights[shape][0], out, choice, bench.scratch, out)

    first: dict[tuple[object, ...], tuple[Shape, Choice]] = {}
    for shape, choice in wanted:
        weight = bench.weights[shape][0]
        first.setdefault((shape in bench.float_out, weight.bias is None, weight.gated, choice.kernel), (shape, choice))
    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(compile_one, first.values()))


def warm(
    table: ChoiceTable,
    weights: Mapping[Shape, Weight],
    dtype: torch.dtype,
    scratch: MatmulScratch,
    float_out: Collection[Shape] = (),
) -> None:
    """Compiles and loads all that `table` may choose for `weights`, with and without a residual, for any rows.

    After it no product of these weights compiles anything. Runs on the current stream.
    """
    bench = _bench({shape: [weight] for shape, weight in weights.items()}, 1, dtype, float_out, scratch)
    wanted = [(shape, choice) for shape in weights for choice in table.choices(*shape) if choice.kind == "triton"]
    _compile_all(bench, wanted, residuals=True)
    for shape, choice in [*wanted, *((shape, CUBLAS) for shape in weights)]:
        bench.run(shape, 1, 1, choice, weights[shape])
        if bench.adds(shape):
            bench.run(shape, 1, 1, choice, weights[shape], adds=True)
