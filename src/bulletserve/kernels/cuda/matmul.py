"""Matrix products that take as many SMs as they are given: out = x W^T (+ bias) (+ residual), rounded once.

A gated weight is the packed gate and up projection of a SwiGLU: its product ends in silu(gate) * up, before anything
is written. Its rows lie in turns of eight of the gate and eight of up, which is how the tensor cores hand sums out: a
thread has both partners.

Knows nothing about models, partitions or graphs: it is told how many SMs the stream has. One persistent Triton
kernel does it all. Its programs may first share the K loops of a few tiles evenly (stream-K), then take whole tiles
in turn, so that no SM idles through a last, part-filled wave. A tile that several programs worked on is summed by
the last of them to arrive, always in the order of K: the result does not depend on who was last. Sharing has a price
beside the sums: programs far apart in K do not meet in L2, so it pays for weights that are read once (few rows) and
seldom for many rows with a long K. For few rows the operands change places, because the tensor cores want 64 rows of
the first one and a weight has plenty.

Few rows: the time is that of reading the weight once. Many: 2 M N K over the rate of the SMs at hand.
cuBLAS is one of the choices; cuBLASLt, told the number of SMs through process-wide state, only under `blas_sms`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bulletserve.core.errors import ConfigError
from bulletserve.kernels.cuda.activation import TURN, silu_mul
from bulletserve.kernels.cuda.matmul_choice import Choice, most_streamed_tiles, schedule

_ALIGNMENT = 16  # bytes: what the copy engine needs of addresses and row strides
_GROUP_ROWS = 2048  # that take one block of the weight after the other: what is in flight is about square
MOST_TILE_ELEMENTS = 128 * 256
MOST_PER_SM = 2
_UNSPECIALIZED = ("rows", "cols8", "out_stride8", "residual_stride8", "k_tiles", "stream_tiles")


@triton.jit
def _program_of(iteration, base, extra):
    """Which program does this iteration of the shared tiles, when the first `extra` of them do one more."""
    longer = extra * (base + 1)
    return tl.where(iteration < longer, iteration // (base + 1), extra + (iteration - longer) // tl.maximum(base, 1))


@triton.jit
def _half(acc, SECOND: tl.constexpr):
    """The first or the second half of acc's columns."""
    first, second = tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))
    if SECOND:
        half = second
    else:
        half = first
    return half


@triton.jit
def _chunk(acc, INDEX: tl.constexpr, CHUNKS: tl.constexpr):
    """One of CHUNKS (1, 2 or 4) equal column ranges of acc: the epilogue takes small pieces to save shared memory."""
    if CHUNKS == 1:
        chunk = acc
    elif CHUNKS == 2:
        chunk = _half(acc, INDEX)
    else:
        chunk = _half(_half(acc, INDEX // 2), INDEX % 2)
    return chunk


@triton.jit
def _gated(chunk, SWAP: tl.constexpr):
    """silu(gate) * up of a chunk whose weight rows are gate and up in turns of eight."""
    if SWAP:
        turns = tl.permute(tl.reshape(chunk, (chunk.shape[0] // 16, 2, 8, chunk.shape[1])), (0, 2, 3, 1))
        gate, up = tl.split(turns)
        both = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (chunk.shape[0] // 2, chunk.shape[1]))
    else:
        turns = tl.permute(tl.reshape(chunk, (chunk.shape[0], chunk.shape[1] // 16, 2, 8)), (0, 1, 3, 2))
        gate, up = tl.split(turns)
        both = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (chunk.shape[0], chunk.shape[1] // 2))
    return both


@triton.jit
def _finish(
    chunk, INDEX: tl.constexpr, row, col, rows, cols, out, out_stride, bias, residual, residual_stride,
    SWAP: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Adds bias and residual to the INDEX-th chunk of the tile that begins at [row, col]; writes what is inside out."""
    if GATED:
        chunk = _gated(chunk, SWAP)
        col //= 2
        cols //= 2
    if SWAP:
        row += INDEX * chunk.shape[1]
        in_col = tl.arange(0, chunk.shape[0])[:, None]
        in_row = tl.arange(0, chunk.shape[1])[None, :]
    else:
        col += INDEX * chunk.shape[1]
        in_row = tl.arange(0, chunk.shape[0])[:, None]
        in_col = tl.arange(0, chunk.shape[1])[None, :]
    mask = (in_row < rows - row) & (in_col < cols - col)
    if bias is not None:
        chunk += tl.load(bias + col + in_col, mask=in_col < cols - col, other=0.0).to(tl.float32)
    if residual is not None:
        origin = residual + row.to(tl.int64) * residual_stride + col
        chunk += tl.load(origin + (in_row * residual_stride + in_col), mask=mask, other=0.0).to(tl.float32)
    origin = out + row.to(tl.int64) * out_stride + col
    tl.store(origin + (in_row * out_stride + in_col), chunk.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _place(tile, tiles_m, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile. Neighbours in time share GROUP blocks of rows, so that L2 serves the weight."""
    in_group = tile % (GROUP * tiles_n)
    first = (tile // (GROUP * tiles_n)) * GROUP
    group = tl.minimum(tiles_m - first, GROUP)
    return (first + in_group % group) * BLOCK_M, (in_group // group) * BLOCK_N


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _matmul(
    x,  # descriptor [rows, K]
    weight,  # descriptor [cols, K]
    out,
    bias,
    residual,
    partials,
    counters,
    rows,
    cols8,  # widths and strides travel divided by eight, so that the compiler knows that eight divides them
    out_stride8,
    residual_stride8,
    k_tiles,
    stream_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
):
    A: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    B: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    WIDTH: tl.constexpr = B // CHUNKS
    cols = cols8 * 8
    out_stride = out_stride8 * 8
    residual_stride = residual_stride8 * 8
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(cols, BLOCK_N)

    base = (stream_tiles * k_tiles) // programs
    extra = (stream_tiles * k_tiles) % programs
    begin = program * base + tl.minimum(program, extra)
    streamed = base + tl.where(program < extra, 1, 0)
    first_tile = begin // k_tiles
    last_tile = (begin + streamed - 1) // k_tiles
    length = streamed + tl.maximum(tl.cdiv(tiles_m * tiles_n - stream_tiles - program, programs), 0) * k_tiles

    # `left`: steps of K to the end of the piece at hand, a whole tile or this program's part of a shared one.
    tile = stream_tiles + program
    next_tile = tile + programs
    left = k_tiles
    k = 0
    if streamed > 0:
        next_tile = tile
        tile = first_tile
        left = tl.minimum(k_tiles - begin % k_tiles, streamed)
        k = (begin % k_tiles) * BLOCK_K
    stream_left = streamed - left  # negative where nothing is shared
    row, col = _place(tile, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP)
    done = -1
    done_tile = tile
    done_next = next_tile
    left += 1
    k -= BLOCK_K

    acc = tl.zeros((A, B), dtype=tl.float32)
    inside = tl.arange(0, A)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    for i in tl.range(0, length):
        # Where loads go must not hang on the branch that writes sums, or they would wait for it: two sets of books,
        # and this one is kept before the loads, or the compiler does not pipeline them.
        left -= 1
        k += BLOCK_K
        if left == 0:
            streaming = stream_left > 0
            left = tl.where(streaming, tl.minimum(k_tiles, stream_left), k_tiles)
            stream_left -= left
            tile = tl.where(streaming, tile + 1, next_tile)
            next_tile = tl.where(streaming, next_tile, next_tile + programs)
            k = 0
            row, col = _place(tile, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP)
        x_tile = x.load([row, k])
        weight_tile = weight.load([col, k])
        if SWAP:
            acc = tl.dot(weight_tile, x_tile.T, acc)
        else:
            acc = tl.dot(x_tile, weight_tile.T, acc)
        if left == 1:
            if i - done == k_tiles:
                done_row, done_col = _place(done_tile, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP)
                for c in tl.static_range(CHUNKS):
                    _finish(
                        _chunk(acc, c, CHUNKS), c, done_row, done_col, rows, cols,
                        out, out_stride, bias, residual, residual_stride, SWAP, GATED,
                    )  # fmt: skip
            else:
                slot = program * 2 + tl.where(done_tile == first_tile, 0, 1)
                for c in tl.static_range(CHUNKS):
                    tl.store(partials + slot * (A * B) + c * (A * WIDTH) + inside, _chunk(acc, c, CHUNKS))
            acc = tl.zeros((A, B), dtype=tl.float32)
            streaming = i < streamed - 1
            done_tile = tl.where(streaming, done_tile + 1, done_next)
            done_next = tl.where(streaming, done_next, done_next + programs)
            done = i

    if streamed > 0:
        tl.debug_barrier()  # every thread's part of a shared tile is written before one of them says so
        for which in range(2):
            tile = tl.where(which == 0, first_tile, last_tile)
            first = _program_of(tile * k_tiles, base, extra)
            last = _program_of(tile * k_tiles + k_tiles - 1, base, extra)
            if (first < last) & ((which == 0) | (first_tile < last_tile)):
                if tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == last - first:
                    tl.store(counters + tile, 0)
                    row, col = _place(tile, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP)
                    began = (first * base + tl.minimum(first, extra)) // k_tiles
                    one = partials + (first * 2 + tl.where(began == tile, 0, 1)) * (A * B)
                    other = partials + (first + 1) * 2 * (A * B)  # whoever is not the first begins inside the tile
                    for c in tl.static_range(CHUNKS):
                        part = c * (A * WIDTH) + inside
                        total = tl.load(one + part, cache_modifier=".cg") + tl.load(other + part, cache_modifier=".cg")
                        for p in range(2, last - first + 1):
                            total += tl.load(other + (p - 1) * 2 * (A * B) + part, cache_modifier=".cg")
                        _finish(
                            total, c, row, col, rows, cols, out, out_stride, bias, residual, residual_stride, SWAP,
                            GATED,
                        )  # fmt: skip


class MatmulScratch:
    """A lane's own memory for tiles that several programs share: two lanes at once must not use one scratch.

    `partials` holds unfinished sums (two tiles for each program), `counters` how many have arrived at each shared
    tile; the last one to arrive sets its counter back to zero. `sms` is the most SMs the lane may ever have.
    """

    def __init__(self, device: torch.device, sms: int, tile_elements: int = MOST_TILE_ELEMENTS) -> None:
        self.partials = torch.empty(2 * sms * tile_elements, dtype=torch.float32, device=device)
        self.counters = torch.zeros(most_streamed_tiles(sms, MOST_PER_SM), dtype=torch.int32, device=device)


class Weight:
    """A weight [N, K], contiguous, with an optional bias [N], and its descriptors for the copy engine.

    `gated`: made by `gated_weight`, its product is [M, N / 2]. Raises ConfigError unless eight divides N and K.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> None:
        if weight.dim() != 2 or weight.shape[0] % 8 or weight.shape[1] % 8 or not weight.is_contiguous():
            raise ConfigError(
                f"a weight must be contiguous [N, K] with N and K multiples of 8, not {tuple(weight.shape)}: "
                "run models of other shapes with --device cpu"
            )
        self.weight = weight
        self.gated = gated
        self.out_features = weight.shape[0] // (2 if gated else 1)
        self.transposed = weight.T
        self.bias = bias
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    def descriptor(self, block_n: int, block_k: int) -> TensorDescriptor:
        """The weight in boxes of [block_n, block_k]."""
        descriptor = self._descriptors.get((block_n, block_k))
        if descriptor is None:
            descriptor = TensorDescriptor.from_tensor(self.weight, [block_n, block_k])
            self._descriptors[block_n, block_k] = descriptor
        return descriptor


def gated_weight(gate: Tensor, up: Tensor) -> Weight:
    """The weight of silu(x gate^T) * (x up^T), `gate` and `up` [I, K]; ConfigError unless eight divides I and K."""
    if gate.shape[0] % TURN or gate.shape != up.shape:
        raise ConfigError(f"gate and up must be [I, K] with I a multiple of {TURN}, not {gate.shape} and {up.shape}")
    turns = torch.stack([half.view(-1, TURN, half.shape[1]) for half in (gate, up)], dim=1)
    return Weight(turns.view(-1, gate.shape[1]), gated=True)


def matmul(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    choice: Choice,
    sms: int,
    scratch: MatmulScratch,
    residual: Tensor | None = None,
    wide: Tensor | None = None,
) -> None:
    """out [M, N] = x [M, K] W^T (+ bias) (+ residual [M, N], which may be `out` itself), on `sms` SMs.

    A gated weight takes neither bias nor residual and gives [M, N / 2]; libraries put its plain product into `wide`
    [M, N] first. `out` is of x's dtype or float32; sums are float32 and rounded once (cuBLAS with bias and residual:
    twice). Rows are contiguous and 16-byte aligned. Raises ConfigError where they are not.
    """
    if choice.kind == "triton":
        _launch(x, weight, out, choice, sms, scratch, residual)
    elif choice.kind == "cublas":
        _blas(x, weight, out, residual, wide)
    else:
        with blas_sms(sms, _total_sms(x.device)):
            _blas(x, weight, out, residual, wide)


_compiled: dict[tuple[Choice, torch.dtype, torch.dtype, bool, bool, bool], Any] = {}


def _launch(
    x: Tensor, weight: Weight, out: Tensor, choice: Choice, sms: int, scratch: MatmulScratch, residual: Tensor | None
) -> None:
    programs, arguments = _arguments(x, weight, out, choice, sms, scratch, residual)
    key = (choice, x.dtype, out.dtype, weight.bias is not None, residual is not None, weight.gated)
    compiled = _compiled.get(key)
    if compiled is None:  # also whenever Triton interprets: then a launch returns None
        _compiled[key] = _matmul[(programs,)](*arguments, num_warps=choice.warps, num_stages=choice.stages)
    else:
        compiled[(programs, 1, 1)](*arguments)


def _arguments(
    x: Tensor, weight: Weight, out: Tensor, choice: Choice, sms: int, scratch: MatmulScratch, residual: Tensor | None
) -> tuple[int, tuple[Any, ...]]:
    """The kernel's grid and its arguments in order."""
    rows, inner = x.shape
    cols = weight.weight.shape[0]
    if (rows, weight.out_features) != out.shape or inner != weight.weight.shape[1]:
        raise ConfigError(f"{x.shape} times {weight.weight.shape} transposed does not go into {out.shape}")
    addresses = x.data_ptr() | out.data_ptr() | (0 if residual is None else residual.data_ptr())
    out_stride = out.stride(0)
    residual_stride = 0 if residual is None else residual.stride(0)
    if addresses % _ALIGNMENT or (out_stride | residual_stride | x.stride(0)) % 8:
        raise ConfigError("rows of a matrix product must begin at multiples of 16 bytes")
    programs, streamed = schedule(choice, rows, cols, inner, sms)
    if streamed and 2 * programs * choice.block_m * choice.block_n > scratch.partials.shape[0]:
        raise ConfigError(f"the scratch is too small for {programs} programs of {choice}")
    return programs, (
        TensorDescriptor(x, [rows, inner], [x.stride(0), 1], [choice.block_m, choice.block_k]),
        weight.descriptor(choice.block_n, choice.block_k),
        out,
        weight.bias,
        residual,
        scratch.partials,
        scratch.counters,
        rows,
        cols // 8,
        out_stride // 8,
        residual_stride // 8,
        -(-inner // choice.block_k),
        streamed,
        choice.block_m,
        choice.block_n,
        choice.block_k,
        choice.swap,
        choice.chunks,
        _GROUP_ROWS // choice.block_m,
        weight.gated,
    )


def _blas(x: Tensor, weight: Weight, out: Tensor, residual: Tensor | None, wide: Tensor | None) -> None:
    if weight.gated:
        if wide is None:
            raise ConfigError("a library's product with a gated weight needs memory for gate and up")
        torch.mm(x, weight.transposed, out=wide)
        silu_mul(wide, out)
        return
    bias = weight.bias if residual is None else residual
    options: dict[str, Any] = {} if out.dtype == x.dtype else {"out_dtype": out.dtype}
    if bias is None:
        torch.mm(x, weight.transposed, **options, out=out)
    else:
        torch.addmm(bias.to(out.dtype), x, weight.transposed, **options, out=out)
    if residual is not None and weight.bias is not None:
        out.add_(weight.bias)


@lru_cache(maxsize=8)
def _total_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@contextmanager
def blas_sms(sms: int, total: int) -> Iterator[None]:
    """Lets cuBLASLt choose kernels for `sms` of `total` SMs. Process-wide: only while no other lane runs."""
    library = torch.backends.cuda.preferred_blas_library()
    carveout = torch._C._get_sm_carveout_experimental()
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch._C._set_sm_carveout_experimental(total - sms)
        yield
    finally:
        torch._C._set_sm_carveout_experimental(carveout)
        torch.backends.cuda.preferred_blas_library(library)


def compile_ahead(
    x: Tensor, weight: Weight, out: Tensor, choice: Choice, scratch: MatmulScratch, residual: Tensor | None
) -> None:
    """Compiles what such a call would launch, for any number of rows, and launches nothing; any thread may do it."""
    _, arguments = _arguments(x, weight, out, choice, 1, scratch, residual)
    _matmul.warmup(*arguments, grid=(1,), num_warps=choice.warps, num_stages=choice.stages)
