"""The persistent matrix product itself, in Triton; `matmul` launches it and tells what it is for.

Knows nothing about choices or tuning. Its programs may first share the K loops of a few tiles evenly (stream-K), then
take whole tiles in turn, so that no SM idles through a last, part-filled wave. A tile that several programs worked on
is summed by the last of them to arrive, always in the order of K: the result does not depend on who was last. For few
rows the operands change places (SWAP), because the tensor cores want 64 rows of the first one and a weight has plenty.
"""

import triton
import triton.language as tl

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
def matmul_kernel(
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
