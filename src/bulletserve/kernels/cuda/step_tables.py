"""The bookkeeping of a step on the device: who runs, how long each is, which token came last.

Knows nothing about requests: a seat is a row of the tables, and their last row (a spare) is what padding rows
point at. Every call is one launch whose shape depends on capacities alone; counts are read on the device, so
that all of it can be replayed in a CUDA graph.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

PAIR_WORDS = 2  # place in the flattened block tables, block id
SEAT_WORDS = 7  # seat, length, temperature's bits, top_p's bits, top_k, seed's low and high half
HEADER_WORDS = 2  # number of pairs, number of seats
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class SeatTables:
    """One row per seat, the last a spare.

    `tables` int32 [seats, max_blocks], `lengths` int32 (tokens in the cache before the step), `last_token` int32,
    and how the seat samples: `temperature` float32, `top_p` float32, `top_k` int32, `seed` int64, each [seats].
    """

    tables: Tensor
    lengths: Tensor
    last_token: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor


def update_words(pairs: int, seats: int) -> int:
    """Int32 words of a staging buffer for at most so many block pairs and seat records."""
    return HEADER_WORDS + PAIR_WORDS * pairs + SEAT_WORDS * seats


@triton.jit
def _apply_updates(
    updates, tables, lengths, temperature, top_p, top_k, seed, pairs: tl.constexpr, seats: tl.constexpr,
    pair_programs: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < pair_programs:
        item = program * block + tl.arange(0, block)
        mask = (item < tl.load(updates)) & (item < pairs)
        pair = updates + 2 + 2 * item
        place = tl.load(pair, mask, 0)
        tl.store(tables + place, tl.load(pair + 1, mask, 0), mask)
    else:
        item = (program - pair_programs) * block + tl.arange(0, block)
        mask = (item < tl.load(updates + 1)) & (item < seats)
        record = updates + 2 + 2 * pairs + 7 * item
        seat = tl.load(record, mask, 0)
        tl.store(lengths + seat, tl.load(record + 1, mask, 0), mask)
        tl.store(temperature + seat, tl.load(record + 2, mask, 0).to(tl.float32, bitcast=True), mask)
        tl.store(top_p + seat, tl.load(record + 3, mask, 0).to(tl.float32, bitcast=True), mask)
        tl.store(top_k + seat, tl.load(record + 4, mask, 0), mask)
        low = tl.load(record + 5, mask, 0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(record + 6, mask, 0).to(tl.int64)
        tl.store(seed + seat, (high << 32) | low, mask)


def apply_updates(updates: Tensor, pairs: int, seat_records: int, seats: SeatTables) -> None:
    """Carries staged changes into the tables.

    `updates` int32 [update_words(pairs, seat_records)]: the two counts, then the pairs' part, then the seats' part,
    each filled from its beginning. No place and no seat may occur twice.
    """
    pair_programs = triton.cdiv(pairs, _BLOCK)
    grid = (pair_programs + triton.cdiv(seat_records, _BLOCK),)
    _apply_updates[grid](
        updates, seats.tables, seats.lengths, seats.temperature, seats.top_p, seats.top_k, seats.seed,
        pairs, seat_records, pair_programs, _BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _begin_decode(
    rows, live, first_row, lengths, last_token, tables, ids, positions, slots, max_blocks, count: tl.constexpr,
    block_size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * block + tl.arange(0, block)
    inside = item < count
    real = inside & (item < tl.load(live))
    seat = tl.load(rows + item, real, 0).to(tl.int64)
    position = tl.load(lengths + seat, real, 0)
    page = tl.load(tables + seat * max_blocks + position // block_size, real, 0).to(tl.int64)
    place = tl.load(first_row) + item
    tl.store(ids + place, tl.load(last_token + seat, real, -1), inside)
    tl.store(positions + place, position, inside)
    tl.store(slots + place, tl.where(real, page * block_size + position % block_size, -1), inside)


def begin_decode(
    rows: Tensor,
    live: Tensor,
    first_row: Tensor,
    seats: SeatTables,
    block_size: int,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """Writes what a step computes for its decode rows: batch row first_row + b takes the next token of seat rows[b].

    `rows` int32 [B], of which the first `live` are real; the others get id -1, position 0, slot -1. `live` and
    `first_row` are int32 [1] on the device. `ids` int32, `positions` int32 and `slots` int64 are the batch's,
    [first_row + B] or longer.
    """
    count = rows.shape[0]
    _begin_decode[(triton.cdiv(count, _BLOCK),)](
        rows, live, first_row, seats.lengths, seats.last_token, seats.tables, ids, positions, slots,
        seats.tables.shape[1], count, block_size, _BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _finish(rows, live, tokens, new_lengths, lengths, last_token, count: tl.constexpr, block: tl.constexpr):
    item = tl.program_id(0) * block + tl.arange(0, block)
    real = (item < count) & (item < tl.load(live))
    seat = tl.load(rows + item, real, 0)
    tl.store(last_token + seat, tl.load(tokens + item, real, 0), real)
    if new_lengths is None:
        length = tl.load(lengths + seat, real, 0) + 1
    else:
        length = tl.load(new_lengths + item, real, 0)
    tl.store(lengths + seat, length, real)


def finish(rows: Tensor, live: Tensor, tokens: Tensor, new_lengths: Tensor | None, seats: SeatTables) -> None:
    """Notes the sampled `tokens` int32 [R] of the seats `rows` int32 [R], and their lengths.

    A length becomes the one in `new_lengths` int32 [R], or one more where that is None. Rows from `live` on are
    skipped. No seat may occur twice.
    """
    count = rows.shape[0]
    _finish[(triton.cdiv(count, _BLOCK),)](
        rows, live, tokens, new_lengths, seats.lengths, seats.last_token, count, _BLOCK, num_warps=4
    )


@triton.jit
def _gather_rows(hidden, at, live, out, width: tl.constexpr, block: tl.constexpr):
    item = tl.program_id(0).to(tl.int64)
    if item >= tl.load(live):
        return
    column = tl.program_id(1) * block + tl.arange(0, block)
    source = tl.load(at + item).to(tl.int64) * width
    tl.store(out + item * width + column, tl.load(hidden + source + column, column < width), column < width)


def gather_rows(hidden: Tensor, at: Tensor, live: Tensor, out: Tensor) -> None:
    """`out` [R, H] = the rows `at` int32 [R] of `hidden` [T, H]; rows of `out` from `live` (int32 [1]) on stay."""
    rows, width = out.shape
    block = min(2048, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    _gather_rows[grid](hidden, at, live, out, width, block, num_warps=max(1, block // 512))
