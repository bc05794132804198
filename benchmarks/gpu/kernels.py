"""One operator of the model at a time, on a share of the card: its time inside a CUDA graph over the real weights.

Knows nothing about steps. An operator is called once per layer with that layer's weights or cache, so that what it
reads is not in L2 from the call before (but for small activations, which there they are in a real step, too). The lanes
must be idle: their workspaces, scratch memory and streams are used.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.waves import wave_loss
from torch import Tensor

from bulletserve.core.plan import Lane
from bulletserve.engine.cuda.batch_inputs import SegmentArrays
from bulletserve.engine.cuda.library_attention import LibraryPart
from bulletserve.kernels.cuda.matmul import Weight, matmul
from bulletserve.kernels.cuda.matmul_choice import Choice
from bulletserve.kernels.cuda.norm import rms_norm
from bulletserve.kernels.cuda.prefill_attention import prefill_attention
from bulletserve.kernels.cuda.rope import rope_write
from bulletserve.kernels.cuda.sampling import sample
from bulletserve.models.cuda_operators import CudaOperators

REPLAYS = 5


@dataclass(frozen=True, slots=True)
class Operator:
    """`calls`, each one layer's work, and the operations and bytes of one call. `per_step`: calls in a step.

    `wave_loss`: 0 to 1, nan where it is not known. `capture`: whether it may be part of a CUDA graph.
    """

    name: str
    calls: list[Callable[[], None]]
    flops: float
    bytes: float
    per_step: int
    wave_loss: float = float("nan")
    capture: bool = True


@torch.inference_mode()
def call_ms(bench: Bench, lane: Lane, sms: int, operator: Operator) -> float:
    """Milliseconds of one call of `operator` on a lane's stream."""
    stream = bench.stream(lane, sms)

    def work() -> None:
        for call in operator.calls:
            call()

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    again = work
    if operator.capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        again = graph.replay
    times: list[float] = []
    with torch.cuda.stream(stream):
        again()
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            again()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return median(times) / len(operator.calls)


@torch.inference_mode()
def decode_attention_ms(bench: Bench, rows: int, context: int, sms: int) -> float:
    """One layer's decode attention of `rows` rows at `context` tokens."""
    return call_ms(bench, Lane.DECODE, sms, decode_attention(bench, rows, context, sms))


def kv_bytes(bench: Bench, rows: int, context: int) -> float:
    """K and V that one layer's decode attention reads."""
    return float(rows * context * bench.shape.kv_elements_per_token // bench.shape.num_layers * 2)


def decode_attention(bench: Bench, rows: int, context: int, sms: int) -> Operator:
    """Decode attention over random blocks, layer by layer."""
    shape, kernel, device = bench.shape, bench.executor.decode._attention, torch.device("cuda")
    tables = _tables(bench, rows, context)
    seats = torch.arange(rows, dtype=torch.int32, device=device)
    lengths = torch.full((rows,), context - 1, dtype=torch.int32, device=device)
    live = torch.tensor([rows], dtype=torch.int32, device=device)
    first = torch.zeros(1, dtype=torch.int32, device=device)
    _, q, out = _queries(bench, rows)
    torch.cuda.synchronize()
    with torch.cuda.stream(bench.stream(Lane.DECODE, sms)):
        kernel.schedule(seats, lengths, live, first, sms)
    torch.cuda.synchronize()

    def call(kv: Tensor) -> Callable[[], None]:
        return lambda: kernel.run(q, kv, tables, out)

    flops = 4.0 * rows * context * shape.num_heads * shape.head_dim
    calls = [call(kv) for kv in bench.executor.cache.layers]
    return Operator("attention", calls, flops, kv_bytes(bench, rows, context), shape.num_layers)


def prefill_attentions(bench: Bench, tokens: int, sms: int) -> Iterator[Operator]:
    """Causal attention of one whole prompt: our kernel, the library's over pages and over the prompt's own rows."""
    shape, steps, device = bench.shape, bench.executor.batch, torch.device("cuda")
    tables = _tables(bench, 1, tokens)
    qkv, q, out = _queries(bench, tokens)
    segments = steps._segments
    segments.starts[:2] = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    segments.context[:1], segments.seat[:1], segments.count[:1] = tokens, 0, 1
    layers = bench.executor.cache.layers[:8]
    flops = 2.0 * tokens * tokens * shape.num_heads * shape.head_dim
    moved = kv_bytes(bench, 1, tokens) + 2.0 * 2 * tokens * shape.num_heads * shape.head_dim

    def own(kv: Tensor) -> Callable[[], None]:
        return lambda: prefill_attention(q, kv, tables, segments, out, sms)

    yield Operator("attention_own", [own(kv) for kv in layers], flops, moved, shape.num_layers)
    if steps._library is None:
        return
    words = [np.array(values, dtype=np.int32) for values in ([0, tokens], [tokens], [0])]
    for fresh in (False, True):
        part = steps._library.part(fresh=fresh)
        torch.cuda.synchronize()
        with torch.cuda.stream(bench.stream(Lane.PREFILL, sms)):
            steps._library.plan(SegmentArrays(*words), sms, fresh=fresh)
        torch.cuda.synchronize()

        def library(kv: Tensor, part: LibraryPart = part) -> Callable[[], None]:
            return lambda: part.run(qkv, q, kv, out)

        name = "attention_fresh" if fresh else "attention"
        yield Operator(name, [library(kv) for kv in layers], flops, moved, shape.num_layers)


def products(bench: Bench, lane: Lane, rows: int, sms: int, capturing: bool) -> Iterator[Operator]:
    """The four projections and the head, as the engine's table of choices has them for these rows and SMs; gate and up
    with silu and product.

    `capturing`: as in a graph, else as in an eager step.
    """
    steps = bench.executor.decode if lane is Lane.DECODE else bench.executor.batch
    shape, space, model = bench.shape, steps.workspace, steps._model
    choices = operators_of(bench).choices
    q = shape.num_heads * shape.head_dim
    kv = 2 * shape.num_kv_heads * shape.head_dim
    places = {
        "qkv": (space.normed, space.qkv, (q + kv, shape.hidden_size), False),
        "output": (space.attended, space.hidden, (shape.hidden_size, q), True),
        "gate_up": (space.normed, space.active, (2 * shape.intermediate_size, shape.hidden_size), False),
        "down": (space.active, space.hidden, (shape.hidden_size, shape.intermediate_size), True),
        "head": (space.normed, space.logits, (shape.vocab_size, shape.hidden_size), False),
    }
    most = shape.num_layers if lane is Lane.DECODE else 8
    for name, (source, target, (n, k), adds) in places.items():
        if name == "head" and lane is Lane.PREFILL:
            continue  # a row or a few: as in a decode step
        x, out = source[:rows], target[:rows]
        x.normal_()
        out.normal_()
        choice = choices.choose(n, k, rows, sms, capturing)

        def call(weight: Weight, x: Tensor, out: Tensor, choice: Choice, adds: bool) -> Callable[[], None]:
            wide = space.gate_up[: x.shape[0]] if weight.gated else None
            return lambda: matmul(x, weight, out, choice, sms, space.matmul, out if adds else None, wide)

        weights = model.projections[n, k][:most]
        moved = 2.0 * (n * k + rows * k) + out.element_size() * out.numel() * (2 if adds else 1)
        per_step = 1 if name == "head" else shape.num_layers
        loss = wave_loss(choice, rows, n, k, sms)
        yield Operator(
            name, [call(weight, x, out, choice, adds) for weight in weights], 2.0 * rows * n * k, moved, per_step, loss
        )


def small(bench: Bench, lane: Lane, rows: int, sms: int) -> Iterator[Operator]:
    """Norms, rope with the write of K and V, and (for decode) greedy sampling: all bound by memory."""
    steps = bench.executor.decode if lane is Lane.DECODE else bench.executor.batch
    shape, space, model, device = bench.shape, steps.workspace, steps._model, torch.device("cuda")
    hidden, qkv = space.hidden[:rows], space.qkv[:rows]
    for tensor in (hidden, qkv):
        tensor.normal_()
    weight, width = model._final_norm, shape.num_layers

    def norm() -> None:
        rms_norm(hidden, weight, shape.rms_eps, space.normed[:rows])

    positions = torch.arange(rows, dtype=torch.int32, device=device)
    slots = (torch.randperm(bench.loaded.size.total_blocks, device=device)[:rows] + 1) * bench.block_size
    table = operators_of(bench).rope

    def rope(kv: Tensor) -> Callable[[], None]:
        return lambda: rope_write(qkv, positions, slots, table, kv, shape.num_heads, shape.num_kv_heads)

    yield Operator("norm", [norm] * width, 0.0, 4.0 * hidden.numel(), 2 * width)
    yield Operator("rope_write", [rope(kv) for kv in bench.executor.cache.layers], 0.0, 4.0 * qkv.numel(), width)
    if lane is Lane.PREFILL:
        return
    logits, tail = space.logits[:rows].normal_(), bench.executor.decode._tail
    live = torch.tensor([rows], dtype=torch.int32, device=device)
    seats, tokens = bench.executor._seats.device, torch.zeros(rows, dtype=torch.int32, device=device)

    def draw() -> None:
        sample(logits, positions, live, seats, positions, tokens, tail._scratch, sms)

    yield Operator("sampling", [draw] * 8, 0.0, 4.0 * logits.numel(), 1)


def operators_of(bench: Bench) -> CudaOperators:
    """The model's operators: its table of choices and its angles."""
    operators = bench.executor.decode._model._operators
    if not isinstance(operators, CudaOperators):
        raise TypeError("the model does not run on a GPU")
    return operators


def _tables(bench: Bench, rows: int, context: int) -> Tensor:
    """Block tables as wide as the engine's own: its decode kernel is made for them."""
    pool, blocks = bench.pool(), -(-context // bench.block_size)
    tables = torch.zeros_like(bench.executor._seats.device.tables)
    tables[:rows, :blocks] = torch.tensor([pool.take(blocks) for _ in range(rows)], dtype=torch.int32)
    return tables


def _queries(bench: Bench, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed q, k, v, the strided view of q that it is in a step, and room for what it sees."""
    shape = bench.shape
    width = shape.num_heads * shape.head_dim
    qkv = torch.randn(rows, width + 2 * shape.num_kv_heads * shape.head_dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16)
    return qkv, qkv[:, :width].view(rows, shape.num_heads, shape.head_dim), out
