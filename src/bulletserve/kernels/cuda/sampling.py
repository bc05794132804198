"""Choosing the next token on the GPU: the same rules and the same randomness as `kernels/sampling`.

Knows nothing about requests; rows name seats of the sampling tables. Five launches, whatever mix of rows:
  1. peaks: the greatest logit of each split of each row, all that a greedy row needs;
  2. masses: exp((logit - greatest) / temperature), summed by chunks of the vocabulary;
  3. levels: for rows with a filter, counts and masses above a few fixed depths below the peak;
  4. candidates: these rows gather the logits above the least depth that holds their set (top-k, top-p);
  5. choice, one program per row: exact borders of the filters by a search over the float's bits, then the draw.
Nothing is sorted. A row whose set outgrows the candidates' buffer (nearly flat ones) is searched in full.

Masses are integers (fixed point), so sums are exact in any order: a token depends on its logits, seed and
position alone, never on how the row was split or on the rows beside it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bulletserve.core.errors import ConfigError
from bulletserve.kernels.cuda.sampling_search import candidate_choice, gap, mass, pick, uniform
from bulletserve.kernels.cuda.step_tables import SeatTables

_CHUNK = 1024
_LEVELS = 16
_BLOCK = 2048  # of the search
_CANDIDATES = 16384
_PROGRAMS_PER_SM = 8
_MAX_VOCABULARY = 1 << 20  # masses are below 2^42 each, their sums must fit 62 bits


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """Working memory of `sample` for up to so many rows; each stream that samples needs its own."""

    peak_values: Tensor
    peak_ids: Tensor
    masses: Tensor
    level_counts: Tensor
    level_masses: Tensor
    sizes: Tensor
    candidates: Tensor
    candidate_ids: Tensor

    @staticmethod
    def allocate(max_rows: int, vocabulary: int, device: torch.device) -> "SamplingScratch":
        """About 150 KB a row. Raises ConfigError if the vocabulary is too large."""
        if vocabulary > _MAX_VOCABULARY:
            raise ConfigError(f"sampling takes vocabularies of up to {_MAX_VOCABULARY} tokens, not {vocabulary}")
        chunks = triton.cdiv(vocabulary, _CHUNK)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(max_rows, *shape, dtype=dtype, device=device)

        return SamplingScratch(
            peak_values=empty(chunks, dtype=torch.float32),
            peak_ids=empty(chunks, dtype=torch.int32),
            masses=empty(chunks, dtype=torch.int64),
            level_counts=empty(chunks, _LEVELS, dtype=torch.int32),
            level_masses=empty(chunks, _LEVELS, dtype=torch.float32),
            sizes=empty(dtype=torch.int32),
            candidates=empty(_CANDIDATES, dtype=torch.float32),
            candidate_ids=empty(_CANDIDATES, dtype=torch.int32),
        )


@triton.jit(do_not_specialize=["split_chunks", "chunks"])
def _peaks(logits, live, peak_values, peak_ids, vocabulary, split_chunks, chunks, chunk: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    if row >= tl.load(live):
        return
    lane = tl.arange(0, chunk)
    best = tl.full([chunk], float("-inf"), tl.float32)
    best_id = tl.zeros([chunk], tl.int32)
    for i in range(split * split_chunks, tl.minimum((split + 1) * split_chunks, chunks)):
        token = i * chunk + lane
        value = tl.load(logits + row * vocabulary + token, token < vocabulary, float("-inf"))
        better = value > best  # never for NaN
        best = tl.where(better, value, best)
        best_id = tl.where(better, token, best_id)
    peak = tl.max(best, axis=0)
    tl.store(peak_values + row * chunks + split, peak)
    tl.store(peak_ids + row * chunks + split, tl.min(tl.where(best == peak, best_id, vocabulary - 1), axis=0))


@triton.jit
def _peak(peak_values, row, splits, chunks, chunk_block: tl.constexpr):
    split = tl.arange(0, chunk_block)
    return tl.max(tl.load(peak_values + row * chunks + split, split < splits, float("-inf")), axis=0)


@triton.jit
def _inverse(temperature):
    return 1.0 / tl.maximum(temperature, 1e-37)


@triton.jit
def _level(gaps, inverse, by_count):
    """The depth below the peak that the levels measure: in logits for top-k, in nats for top-p alone."""
    return tl.where(by_count, gaps, gaps * inverse)


@triton.jit
def _levels(count: tl.constexpr):
    step = tl.arange(0, count).to(tl.float32)
    return tl.where(step < count - 1, 0.5 + step * (0.5 + 0.04 * step), float("inf"))


@triton.jit(do_not_specialize=["split_chunks", "splits", "chunks"])
def _masses(
    logits, rows, live, temperatures, top_ks, peak_values, masses, vocabulary, split_chunks, splits, chunks,
    chunk_block: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    if row >= tl.load(live):
        return
    seat = tl.load(rows + row)
    temperature = tl.load(temperatures + seat)
    k = tl.load(top_ks + seat)
    if (temperature <= 0) | ((k > 0) & (k < vocabulary)):
        return
    peak = _peak(peak_values, row, splits, chunks, chunk_block)
    inverse = _inverse(temperature)
    lane = tl.arange(0, chunk)
    for i in range(split * split_chunks, tl.minimum((split + 1) * split_chunks, chunks)):
        token = i * chunk + lane
        gaps = gap(tl.load(logits + row * vocabulary + token, token < vocabulary, float("-inf")), peak)
        tl.store(masses + row * chunks + i, tl.sum(mass(tl.exp(-gaps * inverse)), axis=0))


@triton.jit(do_not_specialize=["split_chunks", "splits", "chunks"])
def _measure_levels(
    logits, rows, live, temperatures, top_ps, top_ks, peak_values, level_counts, level_masses, vocabulary,
    split_chunks, splits, chunks, chunk_block: tl.constexpr, chunk: tl.constexpr, levels: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    if row >= tl.load(live):
        return
    seat = tl.load(rows + row)
    temperature = tl.load(temperatures + seat)
    if temperature <= 0:
        return
    k = tl.load(top_ks + seat)
    by_count = (k > 0) & (k < vocabulary)
    if (not by_count) & (tl.load(top_ps + seat) >= 1):
        return
    peak = _peak(peak_values, row, splits, chunks, chunk_block)
    inverse = _inverse(temperature)
    lane = tl.arange(0, chunk)
    level = _levels(levels)
    counts = tl.zeros([levels, chunk], tl.int32)
    sums = tl.zeros([levels, chunk], tl.float32)
    for i in tl.range(split * split_chunks, tl.minimum((split + 1) * split_chunks, chunks), num_stages=4):
        token = i * chunk + lane
        gaps = gap(tl.load(logits + row * vocabulary + token, token < vocabulary, float("-inf")), peak)
        weight = tl.exp(-gaps * inverse)
        # NaN for places beyond the end: above no level.
        depth = tl.where(token < vocabulary, _level(gaps, inverse, by_count), float("nan"))
        above = depth[None, :] <= level[:, None]
        counts += above.to(tl.int32)
        sums += tl.where(above, weight[None, :], 0.0)
    place = (row * chunks + split) * levels + tl.arange(0, levels)
    tl.store(level_counts + place, tl.sum(counts, axis=1))
    tl.store(level_masses + place, tl.sum(sums, axis=1))


@triton.jit(do_not_specialize=["split_chunks", "splits", "chunks"])
def _gather(
    logits, rows, live, temperatures, top_ps, top_ks, peak_values, level_counts, level_masses, sizes, candidates,
    candidate_ids, vocabulary, split_chunks, splits, chunks, capacity: tl.constexpr, chunk_block: tl.constexpr,
    chunk: tl.constexpr, levels: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    if row >= tl.load(live):
        return
    seat = tl.load(rows + row)
    temperature = tl.load(temperatures + seat)
    if temperature <= 0:
        return
    k = tl.load(top_ks + seat)
    p = tl.load(top_ps + seat)
    by_count = (k > 0) & (k < vocabulary)
    if (not by_count) & (p >= 1):
        return
    step = tl.arange(0, levels)
    index = tl.arange(0, chunk_block)[:, None]
    place = (row * chunks + index) * levels + step[None, :]
    split_counts = tl.load(level_counts + place, index < splits, 0)
    counts = tl.sum(split_counts, axis=0)
    sums = tl.sum(tl.load(level_masses + place, index < splits, 0.0), axis=0)
    # These sums are rounded, but by less than the margin.
    whole = tl.max(sums, axis=0)
    enough = tl.where(by_count, counts >= k, sums >= p * whole + 1e-4 * whole)
    lowest = tl.min(tl.where(enough, step, levels - 1), axis=0)
    size = tl.sum(tl.where(step == lowest, counts, 0), axis=0)
    fits = size <= capacity
    if split == 0:
        tl.store(sizes + row, tl.where(fits, size, -1))
    if not fits:
        return
    level = tl.sum(tl.where(step == lowest, _levels(levels), 0.0), axis=0)
    before = tl.where((index < split) & (step == lowest)[None, :], split_counts, 0)
    start = row * capacity + tl.sum(tl.sum(before, axis=1), axis=0)
    peak = _peak(peak_values, row, splits, chunks, chunk_block)
    inverse = _inverse(temperature)
    lane = tl.arange(0, chunk)
    for i in tl.range(split * split_chunks, tl.minimum((split + 1) * split_chunks, chunks), num_stages=4):
        token = i * chunk + lane
        value = tl.load(logits + row * vocabulary + token, token < vocabulary, float("-inf"))
        above = (_level(gap(value, peak), inverse, by_count) <= level) & (token < vocabulary)
        found = tl.sum(above.to(tl.int32), axis=0)
        if found > 0:
            target = start + tl.cumsum(above.to(tl.int32), axis=0) - 1
            tl.store(candidates + target, value, above)
            tl.store(candidate_ids + target, token, above)
            start += found


@triton.jit(do_not_specialize=["splits", "chunks"])
def _choose(
    logits, rows, live, temperatures, top_ps, top_ks, seeds, positions, out, peak_values, peak_ids, masses, sizes,
    candidates, candidate_ids, vocabulary, splits, chunks, capacity: tl.constexpr, chunk_block: tl.constexpr,
    chunk: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(live):
        return
    seat = tl.load(rows + row)
    temperature = tl.load(temperatures + seat)
    split = tl.arange(0, chunk_block)
    values = tl.load(peak_values + row * chunks + split, split < splits, float("-inf"))
    peak = tl.max(values, axis=0)
    ids = tl.load(peak_ids + row * chunks + split, split < splits, vocabulary - 1)
    token = tl.min(tl.where(values == peak, ids, vocabulary - 1), axis=0)
    if temperature > 0:
        inverse = _inverse(temperature)
        k = tl.load(top_ks + seat)
        k = tl.where(k < vocabulary, k, 0)
        p = tl.load(top_ps + seat)
        u = uniform(tl.load(seeds + seat), tl.load(positions + row).to(tl.int64))
        index = tl.arange(0, chunk_block)
        parts = tl.load(masses + row * chunks + index, (index < chunks) & (k <= 0), 0)
        total = tl.sum(parts, axis=0)
        # Without one finite logit there is nothing to draw from.
        if peak > float("-inf"):
            if (k > 0) | (p < 1):
                size = tl.load(sizes + row)
                source = logits + row * vocabulary
                gathered = size >= 0
                if gathered:
                    source = candidates + row * capacity
                else:
                    size = vocabulary
                at = candidate_choice(source, size, peak, inverse, k, p, total, u, block)
                if gathered:
                    token = tl.load(candidate_ids + row * capacity + tl.minimum(at, size - 1))
                else:
                    token = at
            else:
                target = pick(u, total)
                ends = tl.cumsum(parts, axis=0)
                i = tl.sum((ends <= target).to(tl.int32), axis=0)
                before = tl.max(tl.where(ends <= target, ends, 0), axis=0)
                place = i * chunk + tl.arange(0, chunk)
                value = tl.load(logits + row * vocabulary + place, place < vocabulary, float("-inf"))
                ends_inside = before + tl.cumsum(mass(tl.exp(-gap(value, peak) * inverse)), axis=0)
                token = i * chunk + tl.sum((ends_inside <= target).to(tl.int32), axis=0)
    tl.store(out + row, tl.minimum(token, vocabulary - 1))


def sample(
    logits: Tensor,
    rows: Tensor,
    live: Tensor,
    seats: SeatTables,
    positions: Tensor,
    out: Tensor,
    scratch: SamplingScratch,
    sms: int,
) -> None:
    """`out` int32 [R] = one token id for each row of `logits` float32 [R, V], contiguous.

    Row r is sampled as seat rows[r] (int32 [R]) says, with the randomness of its seed and positions[r] (int32 [R]):
    the index of the sampled token in its sequence. Rows from `live` (int32 [1], on the device) on are skipped.
    """
    count, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, _CHUNK)
    split_chunks = triton.cdiv(chunks, min(chunks, triton.cdiv(_PROGRAMS_PER_SM * sms, count)))
    splits = triton.cdiv(chunks, split_chunks)
    chunk_block = triton.next_power_of_2(chunks)
    how = (seats.temperature, seats.top_p, seats.top_k)
    s = scratch
    _peaks[(count, splits)](
        logits, live, s.peak_values, s.peak_ids, vocabulary, split_chunks, chunks, _CHUNK, num_warps=4
    )
    _masses[(count, splits)](
        logits, rows, live, seats.temperature, seats.top_k, s.peak_values, s.masses, vocabulary, split_chunks, splits,
        chunks, chunk_block, _CHUNK, num_warps=4,
    )  # fmt: skip
    _measure_levels[(count, splits)](
        logits, rows, live, *how, s.peak_values, s.level_counts, s.level_masses, vocabulary, split_chunks, splits,
        chunks, chunk_block, _CHUNK, _LEVELS, num_warps=16,
    )  # fmt: skip
    _gather[(count, splits)](
        logits, rows, live, *how, s.peak_values, s.level_counts, s.level_masses, s.sizes, s.candidates,
        s.candidate_ids, vocabulary, split_chunks, splits, chunks, _CANDIDATES, chunk_block, _CHUNK, _LEVELS,
        num_warps=4,
    )  # fmt: skip
    _choose[(count,)](
        logits, rows, live, *how, seats.seed, positions, out, s.peak_values, s.peak_ids, s.masses, s.sizes,
        s.candidates, s.candidate_ids, vocabulary, splits, chunks, _CANDIDATES, chunk_block,
        _CHUNK, min(_BLOCK, triton.next_power_of_2(vocabulary)), num_warps=16,
    )  # fmt: skip
