"""Decode attention over the paged KV cache, divided evenly over exactly the programs that a share of SMs holds.

Knows nothing about models, layers or who owns a block. Decode attention only reads: its floor is the bytes of K
and V over the memory bandwidth, so every SM of the share must keep loads in flight until the very end. The work
is a list of units, one unit being one tile of keys of one (row, KV head) pair, row-major over rows, heads, tiles.
Of P programs the p-th takes the p-th equal slice of that list, whatever the lengths are (stream-K over keys, as
in LeanAttention): no waves, no tail, no split size to choose. A pair cut between programs leaves partial results
in scratch memory, which a second kernel merges in a fixed order: results depend on the lengths and the number of
programs only. (Merging in the attention kernel, by the last program to arrive, cost 5 to 21 us on an H200.)

A program is one warp, so that nothing waits for another warp: a share of few SMs reaches the bandwidth only if a
key costs few instructions and no barriers. It walks its slice pair by pair, a tile of keys at a time; query heads
that share a KV head are one matrix tile. Masks are for the tile that a row's context cuts, and for windows.

Lengths, the number of live rows and the first row are read from device memory and the grid depends on the share
alone, so one captured CUDA graph serves every step. All loads of places that a row may not see are masked, so NaN
in unwritten or freed slots cannot spread.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from bulletserve.core.errors import ConfigError

_TILE = 32  # keys per unit: two halves, each within one block of 16 or more
_STAGES = 3  # K and V two tiles ahead of their use, block ids three
_WARPS = 1
_PROGRAMS_PER_SM = 6  # as many as an SM's registers and shared memory hold
_REGISTERS = 255  # of a thread, at most: nothing spills
_MERGED_AT_ONCE = 32  # partial results


@triton.jit
def _first_tile(context, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first tile of keys that a row of `context` tokens sees; WINDOW 0 is no window."""
    return tl.maximum(context - WINDOW, 0) // TILE if WINDOW > 0 else context * 0


@triton.jit
def _tiles(context, TILE: tl.constexpr, WINDOW: tl.constexpr):
    return tl.cdiv(context, TILE) - _first_tile(context, TILE, WINDOW)


@triton.jit
def _seen(token, context, WINDOW: tl.constexpr):
    seen = token < context
    if WINDOW > 0:
        seen = seen & (token >= context - WINDOW)
    return seen


@triton.jit
def _schedule_kernel(
    rows, lengths, live, ends, seats, contexts, bucket,
    ROWS: tl.constexpr, KV_HEADS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """For each row: its seat, the tokens it attends to, and the end of its units in the list of all units."""
    row = tl.arange(0, ROWS)
    real = (row < tl.load(live)) & (row < bucket)
    seat = tl.load(rows + row, mask=real, other=0)
    context = tl.load(lengths + seat, mask=real, other=0) + 1
    units = tl.where(real, _tiles(context, TILE, WINDOW) * KV_HEADS, 0)
    tl.store(ends + row, tl.cumsum(units, 0))
    tl.store(seats + row, seat)
    tl.store(contexts + row, context)


@triton.jit
def _program_of(unit, chunk, rest):
    """Which program has `unit`, where the first `rest` programs take chunk + 1 units and the others chunk."""
    cut = rest * (chunk + 1)
    return tl.where(unit < cut, unit // (chunk + 1), rest + (unit - cut) // tl.maximum(chunk, 1))


@triton.jit
def _merge_kernel(
    first_row, out, parts, partial, stats, out_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_2: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One query head of the pair that attention's program `first` began and left to the programs after it."""
    first = tl.program_id(0)
    g = tl.program_id(1)
    last = tl.load(parts + first * 2)
    if last < 0:
        return
    pair = tl.load(parts + first * 2 + 1)
    part = tl.arange(0, AT_ONCE)
    d = tl.arange(0, D_2)
    m = float("-inf")
    total = 0.0
    acc = tl.zeros((D_2,), tl.float32)
    program = first
    while program <= last:
        there = program + part <= last
        at = ((program + part) * 2 + (program + part == first).to(tl.int32)) * GROUP + g
        m_part = tl.load(stats + at * 2, mask=there, other=float("-inf"))
        total_part = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
        mask = there[:, None] & (d < D)[None, :]
        acc_part = tl.load(partial + at[:, None] * D + d[None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m, tl.max(m_part, 0))
        weight = tl.exp2(m_part - m_new)
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(total_part * weight, 0)
        acc = acc * alpha + tl.sum(acc_part * weight[:, None], 0)
        m = m_new
        program += AT_ONCE
    row = tl.load(first_row).to(tl.int64) + pair // KV_HEADS
    at_out = out + row * out_stride + (pair % KV_HEADS * GROUP + g) * D + d
    tl.store(at_out, (acc / total).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _pages(table, token, context, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Block ids of the HALF tokens from `token`: one, or one of each if blocks are smaller than that.

    Tokens past the context are taken for its last one: a row of the table may end there.
    """
    if HALF > BLOCK:
        token += tl.arange(0, HALF)
    return tl.load(table + tl.minimum(token, context - 1) // BLOCK)


@triton.jit
def _keys(
    kv, pages, token, seen,
    HALF: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, D_2: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """K and V [HALF, D_2] of the tokens from `token`; offsets inside a block stay out of the arithmetic of 64 bits."""
    key, d = tl.arange(0, HALF), tl.arange(0, D_2)
    in_d = (d < D)[None, :]
    at = (key % BLOCK)[:, None] * D + d[None, :]
    if HALF > BLOCK:
        at = kv + pages.to(tl.int64)[:, None] * (2 * PAGE) + at
    else:
        at = kv + pages.to(tl.int64) * (2 * PAGE) + token % BLOCK * D + at
    if MASKED:
        k = tl.load(at, mask=seen[:, None] & in_d, other=0.0)
        v = tl.load(at + PAGE, mask=seen[:, None] & in_d, other=0.0)
    elif D < D_2:
        k = tl.load(at, mask=in_d, other=0.0)
        v = tl.load(at + PAGE, mask=in_d, other=0.0)
    else:
        k = tl.load(at)
        v = tl.load(at + PAGE)
    return k, v


@triton.jit
def _add_tile(
    query, kv, pages, pages_2, token, context, m, weights, acc, scale,
    HALF: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, D_2: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the two halves of the tile at `token` to a pair's running result.

    `m` is a maximum of old, which follows only when a product exceeds it by a factor of 2 ** 8.
    """
    key = token + tl.arange(0, HALF)
    seen, seen_2 = _seen(key, context, WINDOW), _seen(key + HALF, context, WINDOW)
    k, v = _keys(kv, pages, token, seen, HALF, PAGE, D, D_2, BLOCK, MASKED)
    k_2, v_2 = _keys(kv, pages_2, token + HALF, seen_2, HALF, PAGE, D, D_2, BLOCK, MASKED)
    s = tl.dot(query, tl.trans(k))
    s_2 = tl.dot(query, tl.trans(k_2))
    if MASKED:
        s = tl.where(seen[None, :], s, float("-inf"))
        s_2 = tl.where(seen_2[None, :], s_2, float("-inf"))
    m_tile = tl.max(tl.maximum(s, s_2), 1)
    if tl.max(tl.fma(m_tile, scale, -m), 0) > 8.0:
        m_new = tl.maximum(m, m_tile * scale)
        alpha = tl.exp2(m - m_new)
        weights = weights * alpha[:, None]
        acc = acc * alpha[:, None]
        m = m_new
    p = tl.exp2(tl.fma(s, scale, -m[:, None]))
    p_2 = tl.exp2(tl.fma(s_2, scale, -m[:, None]))
    acc = tl.dot(p.to(v.dtype), v, acc)
    acc = tl.dot(p_2.to(v.dtype), v_2, acc)
    return m, weights + (p + p_2), acc


@triton.jit
def _attend(
    query, kv, table, begin, end, context, scale,
    GROUP_16: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, D_2: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of weights [GROUP_16] and weighted sum of V [GROUP_16, D_2] of tokens `begin` to `end` of a pair."""
    HALF: tl.constexpr = TILE // 2
    m = tl.full((GROUP_16,), float("-inf"), tl.float32)
    weights = tl.zeros((GROUP_16, HALF), tl.float32)
    acc = tl.zeros((GROUP_16, D_2), tl.float32)
    pages = _pages(table, begin, context, HALF, BLOCK)
    pages_2 = _pages(table, begin + HALF, context, HALF, BLOCK)
    if WINDOW == 0:  # the tile that is cut by the context goes first, so that the loop needs no masks
        whole = end // TILE * TILE
        if whole < end:
            last = _pages(table, whole, context, HALF, BLOCK)
            last_2 = _pages(table, whole + HALF, context, HALF, BLOCK)
            m, weights, acc = _add_tile(
                query, kv, last, last_2, whole, context, m, weights, acc, scale,
                HALF, PAGE, D, D_2, BLOCK, WINDOW, True,
            )  # fmt: skip
        end = whole
    for token in tl.range(begin, end, TILE, num_stages=STAGES):
        next_pages = _pages(table, token + TILE, context, HALF, BLOCK)
        next_pages_2 = _pages(table, token + TILE + HALF, context, HALF, BLOCK)
        m, weights, acc = _add_tile(
            query, kv, pages, pages_2, token, context, m, weights, acc, scale,
            HALF, PAGE, D, D_2, BLOCK, WINDOW, WINDOW > 0,
        )  # fmt: skip
        pages, pages_2 = next_pages, next_pages_2
    return m, tl.sum(weights, 1), acc


@triton.jit
def _attention_kernel(
    q, kv, tables, first_row, out, ends, seats, contexts, partial, stats, parts,
    q_stride, out_stride, table_stride, scale,
    ROWS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_16: tl.constexpr, D: tl.constexpr,
    D_2: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program's slice of all units, pair by pair. `scale` turns products into exponents of 2."""
    program = tl.program_id(0)
    ends_of_rows = tl.load(ends + tl.arange(0, ROWS))
    units = tl.max(ends_of_rows, 0)
    chunk = units // tl.num_programs(0)
    rest = units % tl.num_programs(0)
    begin = program * chunk + tl.minimum(program, rest)
    end = begin + chunk + (program < rest).to(tl.int32)
    tl.store(parts + program * 2, -1)
    if begin == end:
        return
    row = tl.sum((ends_of_rows <= begin).to(tl.int32), 0)
    position = begin - tl.max(tl.where(ends_of_rows <= begin, ends_of_rows, 0), 0)
    tiles = _tiles(tl.load(contexts + row), TILE, WINDOW)
    head = position // tiles
    tile = position % tiles
    token_row = tl.load(first_row).to(tl.int64)
    g, d = tl.arange(0, GROUP_16), tl.arange(0, D_2)
    mask = (g < GROUP)[:, None] & (d < D)[None, :]
    in_group = g[:, None] * D + d[None, :]
    PAGE: tl.constexpr = KV_HEADS * BLOCK * D  # elements of K, or of V, in one block

    while begin < end:
        context = tl.load(contexts + row)
        table = tables + tl.load(seats + row).to(tl.int64) * table_stride
        tiles = _tiles(context, TILE, WINDOW)
        count = tl.minimum(tiles - tile, end - begin)
        token = (_first_tile(context, TILE, WINDOW) + tile) * TILE
        in_row = head * (GROUP * D) + in_group
        query = tl.load(q + (token_row + row) * q_stride + in_row, mask=mask, other=0.0)
        m, total, acc = _attend(
            query, kv + head * (BLOCK * D), table, token, tl.minimum(token + count * TILE, context), context, scale,
            GROUP_16, PAGE, D, D_2, BLOCK, TILE, WINDOW, STAGES,
        )  # fmt: skip
        if (tile == 0) & (count == tiles):
            result = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + (token_row + row) * out_stride + in_row, result, mask=mask)
        else:
            slot = program * 2 + (tile == 0).to(tl.int32)
            tl.store(partial + slot * (GROUP * D) + in_group, acc, mask=mask)
            tl.store(stats + (slot * GROUP + g) * 2, m, mask=g < GROUP)
            tl.store(stats + (slot * GROUP + g) * 2 + 1, total, mask=g < GROUP)
            if tile == 0:  # the pair began here and goes on in the next program
                tl.store(parts + program * 2, _program_of(begin + tiles - 1, chunk, rest))
                tl.store(parts + program * 2 + 1, row * KV_HEADS + head)
        begin += count
        tile = 0
        row_turns = (head + 1 == KV_HEADS).to(tl.int32)
        head = (head + 1) * (1 - row_turns)
        row += row_turns


class DecodeAttention:
    """Decode attention of one lane: scratch memory, made once, and the two launches that use it.

    Serves every batch of up to `max_rows` rows on up to `max_sms` SMs; the launches must follow each other on one
    stream, or be ordered by events. `window` counts the newest tokens a row sees, its own included.
    """

    def __init__(
        self,
        max_rows: int,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        max_sms: int,
        device: torch.device,
        window: int | None = None,
    ) -> None:
        if num_heads % kv_heads or num_heads // kv_heads > 16:
            raise ConfigError(
                f"decode attention needs 1 to 16 query heads per KV head; this model has {num_heads} over {kv_heads}"
            )
        if block_size & (block_size - 1):
            raise ConfigError(f"block size {block_size} is not a power of two; use 16")
        group = num_heads // kv_heads
        rows, d_2 = triton.next_power_of_2(max_rows), triton.next_power_of_2(head_dim)
        group_16, window = max(16, triton.next_power_of_2(group)), window or 0
        self._group = group
        self._schedule_shape = (rows, kv_heads, _TILE, window)
        self._shape = (rows, kv_heads, group, group_16, head_dim, d_2, block_size, _TILE, window, _STAGES)
        self._merge_shape = (kv_heads, group, head_dim, d_2, _MERGED_AT_ONCE)
        self._scale = math.log2(math.e) / math.sqrt(head_dim)

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._plan = (ints(rows), ints(rows), ints(rows))
        slots = 2 * _PROGRAMS_PER_SM * max_sms
        self._partial = torch.empty(slots, group, head_dim, dtype=torch.float32, device=device)
        self._stats = torch.empty(slots, group, 2, dtype=torch.float32, device=device)
        self._parts = ints(slots)  # of each program: the last program that shares its last pair, or -1; the pair

    def schedule(self, rows: Tensor, lengths: Tensor, live: Tensor, first_row: Tensor, sms: int) -> None:
        """Lays out one step's work on `sms` SMs; once a step, before `run` of its layers.

        `rows` int32 [B] seats; `lengths` int32 [max_seqs + 1] tokens of each seat before this step (a row attends
        to one more: its own, already written); `live` int32 [1], rows at or after it have no work; `first_row` int32
        [1], the batch row of decode row 0.
        """
        self._first_row, self._programs = first_row, sms * _PROGRAMS_PER_SM
        _schedule_kernel[(1,)](rows, lengths, live, *self._plan, rows.shape[0], *self._schedule_shape, num_warps=4)

    def run(self, q: Tensor, kv: Tensor, tables: Tensor, out: Tensor) -> None:
        """One layer of the scheduled step.

        `q` [T, heads, head_dim], rows any stride apart, and `out` [T, heads * head_dim]: decode row b is row
        `first_row` + b of both, other rows are not touched. `kv` [blocks, 2, kv_heads, block_size,
        head_dim] of this layer; `tables` int32 [max_seqs + 1, max_blocks].
        """
        _attention_kernel[(self._programs,)](
            q, kv, tables, self._first_row, out, *self._plan, self._partial, self._stats, self._parts,
            q.stride(0), out.stride(0), tables.stride(0), self._scale, *self._shape,
            num_warps=_WARPS, maxnreg=_REGISTERS,
        )  # fmt: skip
        _merge_kernel[(self._programs, self._group)](
            self._first_row,
            out,
            self._parts,
            self._partial,
            self._stats,
            out.stride(0),
            *self._merge_shape,
            num_warps=2,
        )
