"""FlashInfer's tensor-core decode attention (fa2) over the paged KV cache, planned by us on the device.

Knows nothing about models, layers or who owns a block. The library's kernel reads more bytes per instruction than
ours, but its plan is made on the host from lengths that the host must know, for all SMs of the device, and cuts all
rows by one rule. Ours is made by one small launch per step from the seats' tables in device memory, for a share of
the SMs, so that one captured graph serves every step. The library's kernel takes a list of requests and computes one
(request, KV head) per program; every piece of a row is a request of its own here, so a row can be cut anywhere
between two tiles of keys. Its pages are read from the seat's block table where it lies. A small kernel then merges
the pieces of each row.

A program costs its tiles plus a constant, and a share holds a fixed number of programs at once: too few pieces leave
SMs idle at the end, too many pay the constant too often. The planning kernel predicts the time of some dozens of
sizes of the longest piece, takes the best, and lists the longest pieces first. Requests are numbered 2i, because a
request's pages begin at entry i of a list and end at entry i + 1, and ours do not follow each other.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bulletserve.kernels.cuda.flashinfer_library import load_kernels, missing

_TILE_KEYS = {64: 256, 128: 128}  # head dimension -> keys that the library's kernel takes at once
_TILE_ROWS = 16  # of its query tile: the heads of one KV head
_PROGRAMS_PER_SM = 2  # what its registers leave room for
_WAVES_OF_CUTS = 2  # pieces beyond one per row that a plan may have, in programs that a share holds at once
_ITEMS = 32  # pieces per planning program
_MERGED_AT_ONCE = 32  # (piece, head) pairs of one merging program
_FEW_HEADS = 512  # up to so many (row, head) pairs a merging program has one of them, and else:
_HEADS_MERGED = 8
_NO_MASK, _HEADS_FIRST, _NO_WINDOW = 0, 1, -1  # the library's codes
_EVERYTHING = 2**30  # tokens, more than a piece has

# How the library's programs cost, in tiles, fitted to measurements on an H200 with 32 to 132 SMs.
_CONSTANT: tl.constexpr = tl.constexpr(5.0)  # to begin and end one
_WAVE_SHARE: tl.constexpr = tl.constexpr(0.5)  # of the time lost if all programs of a wave ended together
_SIZES: tl.constexpr = tl.constexpr(64)  # sizes of the longest piece to choose from
_SIZES_AT_ONCE: tl.constexpr = tl.constexpr(16)


def available(
    num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> str | None:  # fmt: skip
    """Why this kernel cannot serve a model of these shapes on the current device, or None if it can."""
    if (why := missing()) is not None:
        return why
    if torch.cuda.get_device_capability() < (8, 0):
        return "FlashInfer's fa2 kernel needs an Ampere GPU or a newer one"
    if head_dim not in _TILE_KEYS:
        return f"FlashInfer's fa2 kernel is not planned here for head dimension {head_dim}"
    if num_heads % kv_heads or num_heads // kv_heads > _TILE_ROWS:
        return f"FlashInfer's fa2 kernel does not take {num_heads} query heads over {kv_heads} KV heads in one tile"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer's fa2 kernel does not compute in {dtype}"
    if window is not None:
        return "a sliding window does not begin where a piece may"
    return None


@triton.jit
def _read_rows(rows, lengths, row, real, TILE: tl.constexpr):
    """Seat, tokens attended to, and tiles of `row`; no tiles where it is not `real`."""
    seat = tl.load(rows + row, mask=real, other=0)
    context = tl.load(lengths + seat, mask=real, other=0) + 1
    return seat, context, tl.where(real, tl.cdiv(context, TILE), 0)


@triton.jit
def _wave_time(count, size, slots):
    """The time of `count` programs of `size` tiles each, `slots` at a time, if each wave ended at once."""
    return tl.cdiv(count, slots).to(tl.float32) * (size.to(tl.float32) + _CONSTANT)


@triton.jit
def _choose_size(tiles, items, slots, KV_HEADS: tl.constexpr):
    """The largest number of tiles a piece may have, such that rows of `tiles` are over soonest."""
    longest = tl.max(tiles, 0)
    total = tl.sum(tiles, 0)
    best_cost = float("inf")
    best = tl.maximum(longest, 1)
    for first in range(0, _SIZES, _SIZES_AT_ONCE):
        i = first + tl.arange(0, _SIZES_AT_ONCE)
        beyond = tl.maximum(i - _SIZES // 2, 0)
        size = tl.maximum(tl.cdiv(longest, i + 1 + beyond * beyond // 4), 1)  # 1, 2, .. 33 cuts, and then fewer
        pieces = tl.cdiv(tiles[:, None], size[None, :])
        largest = tl.cdiv(tiles[:, None], tl.maximum(pieces, 1))
        count = tl.sum(pieces, 0)
        shortest = tl.min(tl.where(largest > 0, largest, longest), 0)
        half = (size + 1) // 2
        three_quarters = (3 * size + 3) // 4
        halves = tl.sum(tl.where(largest >= half[None, :], pieces, 0), 0) * KV_HEADS
        quarters = tl.sum(tl.where(largest >= three_quarters[None, :], pieces, 0), 0) * KV_HEADS
        wholes = tl.sum(tl.where(largest >= size[None, :], pieces, 0), 0) * KV_HEADS
        waves = tl.maximum(_wave_time(halves, half, slots), _wave_time(quarters, three_quarters, slots))
        waves = tl.maximum(waves, _wave_time(wholes, size, slots))
        even = (total + _CONSTANT * count) * KV_HEADS / slots
        # Programs begin head after head: the last head's longest piece when the others' short ones are nearly over.
        tail = even * (KV_HEADS - 1) / KV_HEADS + tl.max(largest, 0) - shortest
        cost = tl.maximum(even + _WAVE_SHARE * tl.maximum(waves - even, 0.0), tail)
        cost = tl.where(count <= items, cost, float("inf"))
        least = tl.min(cost, 0)
        if least < best_cost:
            best_cost = least
            best = tl.max(tl.where(cost == least, size, 0), 0)
    return best


@triton.jit(do_not_specialize=["bucket", "items", "slots", "table_width"])
def _plan_kernel(
    rows, lengths, live, first_row, pages, queries, last_page, valid, parts, bucket, items, slots, table_width,
    ROWS: tl.constexpr, KV_HEADS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Every program makes the whole plan and writes some of its items; the first also writes each row's items."""
    row = tl.arange(0, ROWS)
    limit = tl.minimum(tl.load(live), bucket)
    _seat, _context, tiles = _read_rows(rows, lengths, row, row < limit, TILE)
    size = _choose_size(tiles, items, slots, KV_HEADS)

    # Rows with the longest pieces first
    largest = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, size), 1))
    order = tl.sort(largest * ROWS + (ROWS - 1 - row), descending=True)
    row = ROWS - 1 - order % ROWS
    _seat, _context, tiles = _read_rows(rows, lengths, row, row < limit, TILE)
    count = tl.cdiv(tiles, size)
    end = tl.cumsum(count, 0)
    begin = end - count
    if tl.program_id(0) == 0:
        tl.store(parts + row * 2, begin, mask=row < bucket)
        tl.store(parts + row * 2 + 1, count, mask=row < bucket)

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    own = (begin[None, :] <= item[:, None]) & (item[:, None] < end[None, :])
    real = item < tl.max(end, 0)
    row = tl.sum(tl.where(own, row[None, :], 0), 1)
    piece = item - tl.sum(tl.where(own, begin[None, :], 0), 1)
    seat, context, tiles = _read_rows(rows, lengths, row, real, TILE)
    count = tl.maximum(tl.cdiv(tiles, size), 1)
    first_tile = piece * tiles // count
    end_tile = (piece + 1) * tiles // count
    first_page = seat * table_width + first_tile * (TILE // BLOCK)
    end_page = seat * table_width + tl.minimum(end_tile * (TILE // BLOCK), tl.cdiv(context, BLOCK))
    first_query = tl.load(first_row) + row
    listed = item < items
    tl.store(pages + 2 * item, tl.where(real, first_page, 0), mask=listed)
    tl.store(pages + 2 * item + 1, tl.where(real, end_page, 0), mask=listed)
    tl.store(queries + 2 * item, tl.where(real, first_query, 0), mask=listed)
    tl.store(queries + 2 * item + 1, tl.where(real, first_query + 1, 0), mask=listed)
    tl.store(valid + item, real.to(tl.int8), mask=listed)
    tl.store(last_page + 2 * item, tl.where(end_tile == tiles, (context - 1) % BLOCK + 1, BLOCK), mask=listed)


@triton.jit
def _merge_kernel(
    first_row, out, parts, partial, exponents, out_stride,
    HEADS: tl.constexpr, D: tl.constexpr, HEADS_AT_ONCE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Some heads of one row: `partial` [items, heads, D], weighted by 2 to the power of `exponents` [items, heads]."""
    row = tl.program_id(0)
    begin = tl.load(parts + row * 2)
    count = tl.load(parts + row * 2 + 1)
    if count == 0:
        return
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    d = tl.arange(0, D)
    at_head = head[:, None] * D + d[None, :]
    mask = (head < HEADS)[:, None] & (d < D)[None, :]
    at_out = out + (tl.load(first_row) + row).to(tl.int64) * out_stride + at_head
    if count == 1:
        tl.store(at_out, tl.load(partial + begin.to(tl.int64) * (HEADS * D) + at_head, mask=mask), mask=mask)
        return
    m = tl.full((HEADS_AT_ONCE,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS_AT_ONCE,), tl.float32)
    acc = tl.zeros((HEADS_AT_ONCE, D), tl.float32)
    for done in range(0, count, AT_ONCE):
        part = done + tl.arange(0, AT_ONCE)
        there = (part < count)[:, None] & (head < HEADS)[None, :]
        at = (begin + part).to(tl.int64)[:, None] * HEADS + head[None, :]
        exponent = tl.load(exponents + at, mask=there, other=-1e30)
        value = tl.load(partial + at[:, :, None] * D + d[None, None, :], mask=there[:, :, None], other=0.0)
        m_new = tl.maximum(m, tl.max(exponent, 0))
        weight = tl.exp2(exponent - m_new[None, :])
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(weight, 0)
        acc = acc * alpha[:, None] + tl.sum(value.to(tl.float32) * weight[:, :, None], 0)
        m = m_new
    tl.store(at_out, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def count_items(rows: int, kv_heads: int, sms: int) -> int:
    """Pieces that a plan for `rows` rows on `sms` SMs has room for; every KV head runs each of them."""
    at_once = _pieces_at_once(kv_heads, sms)
    return at_once if one_wave(rows, kv_heads, sms) else rows + _WAVES_OF_CUTS * at_once


def most_items(max_rows: int, kv_heads: int, max_sms: int) -> int:
    """The most that `count_items` says of any batch and share: a small share may cut a few rows more than a large one."""
    at_once = _pieces_at_once(kv_heads, max_sms)
    return max(at_once, max_rows + _WAVES_OF_CUTS * min(at_once, 3 * max_rows))


def one_wave(rows: int, kv_heads: int, sms: int) -> bool:
    """Whether the rows are so few that cutting them for one wave of programs is all that helps."""
    return 3 * rows <= _pieces_at_once(kv_heads, sms)


def _pieces_at_once(kv_heads: int, sms: int) -> int:
    return max(sms * _PROGRAMS_PER_SM // kv_heads, 1)


class DecodePlan:
    """The lists that one lane's planning kernel fills, as the library's kernel wants them.

    Piece i is request 2i: entries `pages`[2i] to `pages`[2i + 1] of the flattened tables, the last of them with
    `last_page`[2i] tokens, and query row `queries`[2i]; a piece that is not needed has no pages and no query row, and
    is not `valid`[i]. `parts` [rows, 2] tells the first piece of each row and how many it has, one after another.
    """

    def __init__(
        self,
        max_rows: int,
        kv_heads: int,
        tile: int,
        block_size: int,
        max_sms: int,
        tables_shape: tuple[int, int],
        device: torch.device,
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._kv_heads, self._table_width = kv_heads, tables_shape[1]
        tile = max(tile // block_size, 1) * block_size
        self._shape = (triton.next_power_of_2(max_rows), kv_heads, tile, block_size, _ITEMS)
        self.room = room = -(-max(most_items(max_rows, kv_heads, max_sms), 2) // 4) * 4
        self.pages, self.queries, self.last_page = (ints(2 * room + 1) for _ in range(3))
        self.pages[-1] = tables_shape[0] * tables_shape[1]  # where the library stops reading block ids
        self.parts = ints(max_rows, 2)
        # What no plan changes: the request, and the tiles of queries and keys, of each piece; the place of the result
        # of each request; how long a piece may be; that the library's own merging has no rows. Then `valid`.
        piece = torch.arange(room, dtype=torch.int32, device=device)
        others = torch.tensor([_EVERYTHING, 0], dtype=torch.int32, device=device)
        fixed = [2 * piece, 0 * piece, piece.repeat_interleave(2), others]
        self.workspace = torch.cat([*fixed, ints(room // 4)])
        self.valid = self.workspace[4 * room + 2 :].view(torch.int8)
        self.rows = self.items = 0  # of the step planned last
        self.masked = False

    def make(self, rows: Tensor, lengths: Tensor, live: Tensor, first_row: Tensor, sms: int) -> None:
        """One launch; see `FlashInferDecode.schedule`."""
        self.rows, self.items = rows.shape[0], count_items(rows.shape[0], self._kv_heads, sms)
        self.masked = not one_wave(self.rows, self._kv_heads, sms)
        _plan_kernel[(triton.cdiv(self.items, _ITEMS),)](
            rows, lengths, live, first_row, self.pages, self.queries, self.last_page, self.valid, self.parts,
            self.rows, self.items, sms * _PROGRAMS_PER_SM, self._table_width, *self._shape, num_warps=8,
        )  # fmt: skip

    def for_library(self, exponents_at: int) -> list[int]:
        """The numbers that the library's plan would return: sizes, offsets in bytes, and what kind of plan it is.

        Pieces that are not valid cost next to nothing in a masked plan, but the library then launches its own merging
        kernel too, of no rows. `exponents_at` is where they begin in the workspace of results, if it is masked.
        """
        piece, place, longest = 4 * self.room, 8 * self.room, 16 * self.room
        sizes = [self.items, 1, longest + 4, _TILE_ROWS]
        lists = [0, piece, piece, 0, place, longest]
        return [*sizes, *lists, 0, exponents_at, longest + 8, int(self.masked), int(self.masked)]


def merge_parts(plan: DecodePlan, first_row: Tensor, partial: Tensor, exponents: Tensor, out: Tensor) -> None:
    """`out` [T, heads * head_dim] rows `first_row` + b, of the planned rows b that are live.

    `partial` [items, heads, head_dim] holds each piece's attention and `exponents` [items, heads] the logarithm to
    base 2 of the sum of its weights.
    """
    heads, head_dim = partial.shape[1:]
    at_once = 1 if plan.rows * heads < _FEW_HEADS else _HEADS_MERGED
    _merge_kernel[(plan.rows, triton.cdiv(heads, at_once))](
        first_row, out, plan.parts, partial, exponents, out.stride(0), heads, head_dim, at_once,
        _MERGED_AT_ONCE // at_once, num_warps=4,
    )  # fmt: skip


class FlashInferDecode:
    """Decode attention of one lane, in place of `DecodeAttention`; two lanes need two objects.

    Serves every batch of up to `max_rows` rows on up to `max_sms` SMs; the launches must follow each other on one
    stream, or be ordered by events. The first object of a process loads the library's compiled kernel, or compiles it.
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
        dtype: torch.dtype,
        tables_shape: tuple[int, int],
    ) -> None:
        """`tables_shape` is that of the tables that `run` will be given.

        `ConfigError` if the library cannot load or build its kernel.
        """
        self._paged = _kernel(head_dim, dtype)
        self._plan = DecodePlan(max_rows, kv_heads, _TILE_KEYS[head_dim], block_size, max_sms, tables_shape, device)
        results = (self._plan.room, num_heads, head_dim)
        self._exponents_at = math.prod(results) * dtype.itemsize
        size = self._exponents_at + 4 * math.prod(results[:2])
        self._results = torch.empty(size, dtype=torch.uint8, device=device)
        self._partial = self._results[: self._exponents_at].view(dtype).view(results)
        self._exponents = self._results[self._exponents_at :].view(torch.float32).view(results[:2])
        # No dependent launch, eight absent tensors, no soft cap, scale of the scores, rotary scales, no items.
        self._rest = (False, *[None] * 8, 0.0, 1.0 / math.sqrt(head_dim), 1.0, 1.0, 0)

    def schedule(self, rows: Tensor, lengths: Tensor, live: Tensor, first_row: Tensor, sms: int) -> None:
        """Plans one step on `sms` SMs; once a step, before `run` of its layers.

        `rows` int32 [B] seats; `lengths` int32 [max_seqs + 1] tokens of each seat before this step (a row attends
        to one more: its own, already written); `live` int32 [1], rows at or after it have no work; `first_row` int32
        [1], the batch row of decode row 0.
        """
        self._first_row = first_row
        self._plan.make(rows, lengths, live, first_row, sms)

    def run(self, q: Tensor, kv: Tensor, tables: Tensor, out: Tensor) -> None:
        """One layer of the scheduled step.

        `q` [T, heads, head_dim], rows any stride apart, and `out` [T, heads * head_dim]: decode row b is row
        `first_row` + b of both, other rows are not touched. `kv` [blocks, 2, kv_heads,
        block_size, head_dim] of this layer; `tables` int32, contiguous.
        """
        plan = self._plan
        k, v = kv.unbind(1)
        # Two rows are enough to tell how far apart rows are; the library wants as many of q and of the exponents.
        some = min(q.shape[0], 2)
        self._paged(
            self._results, plan.workspace, plan.for_library(self._exponents_at), q[:some], k, v, plan.queries,
            plan.pages, tables, plan.last_page, self._partial, self._exponents[:some], _NO_MASK, _HEADS_FIRST,
            _NO_WINDOW, *self._rest,
        )  # fmt: skip
        merge_parts(plan, self._first_row, self._partial, self._exponents, out)


def _kernel(head_dim: int, dtype: torch.dtype) -> Any:
    """The library's compiled function; its wrapper classes would plan on the host."""
    return load_kernels("fa2", head_dim, dtype, "decode").paged_run
