"""Parts of `cuda/sampling` that work on one row: randomness, masses in fixed point, exact borders of the filters.

Knows nothing about seats or launches. The border of a filter is the least key K such that the elements up to K
count or weigh enough; keys are bits of non-negative floats, which order as the floats do. The search narrows K by
nine at each pass over the row, and ends exactly.
"""

import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)
_ONE = tl.constexpr(0x3F800000)
_PIVOTS = tl.constexpr(8)


@triton.jit
def _mix(x):
    """The finaliser of splitmix64 in uint64, where shifts are logical and products wrap."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, position):
    """One float64 in [0, 1) from int64 `seed` and `position`, the same as `kernels.sampling.uniforms` gives."""
    bits = _mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    bits = _mix(bits + position.to(tl.uint64) * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7)
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def pick(u, total):
    """The place of `u` in [0, 1) among `total` int64 units of mass."""
    return tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def gap(value, peak):
    """How far logits lie below the greatest, at least 0; infinite for -inf and NaN, which are never drawn."""
    return tl.where(value > float("-inf"), tl.where(value >= peak, 0.0, peak - value), float("inf"))


@triton.jit
def mass(weight):
    """Weights in [0, 1] in units of 2^-42."""
    return (weight * 4398046511104.0).to(tl.int64)


@triton.jit
def _keys(value, peak, inverse):
    """For each logit the key of top-k (its gap), the key of top-p (one minus its weight, in bits) and its mass."""
    gaps = gap(value, peak)
    weight = tl.minimum(tl.exp(-gaps * inverse), 1.0)
    return gaps.to(tl.int32, bitcast=True), -weight.to(tl.int32, bitcast=True) + _ONE, mass(weight)


@triton.jit
def _border(source, size, peak, inverse, need, k_border, by_count: tl.constexpr, block: tl.constexpr):
    """The least key up to which elements count `need` (top-k) or weigh `need` (top-p, among those top-k kept).

    Returns the key and what lies before it.
    """
    lane = tl.arange(0, block)
    step = tl.arange(0, _PIVOTS) + 1
    low = tl.full([], -1, tl.int32)
    high = tl.full([], _INFINITY if by_count else _ONE, tl.int32)
    before = tl.zeros([], tl.int64)
    while high - low > 1:
        pivots = low + ((high - low).to(tl.int64) * step // (_PIVOTS + 1)).to(tl.int32)
        parts = tl.zeros([_PIVOTS, block], tl.int32 if by_count else tl.int64)
        for start in tl.range(0, size, block, num_stages=3):
            value = tl.load(source + start + lane, start + lane < size, float("-inf"))
            k_key, p_key, masses = _keys(value, peak, inverse)
            # Places beyond the end have the greatest key and no mass, and every pivot is below that key.
            if by_count:
                parts += (k_key[None, :] <= pivots[:, None]).to(tl.int32)
            else:
                masses = tl.where(k_key <= k_border, masses, 0)
                parts += tl.where(p_key[None, :] <= pivots[:, None], masses[None, :], 0)
        sums = tl.sum(parts, axis=1).to(tl.int64)
        reached = sums >= need
        high = tl.min(tl.where(reached, pivots, high), axis=0)
        before = tl.max(tl.where(reached, before, sums), axis=0)
        low = tl.max(tl.where(reached, low, pivots), axis=0)
    return high, before


@triton.jit
def _measure(source, start, size, peak, inverse, k_border, p_border, last, ties: tl.constexpr, block: tl.constexpr):
    """A block's masses inside the filters, or (`ties`) one for each element at top-p's border; int64 [block]."""
    place = start + tl.arange(0, block)
    value = tl.load(source + place, place < size, float("-inf"))
    k_key, p_key, masses = _keys(value, peak, inverse)
    at_border = p_key == p_border
    if ties:
        return (at_border & (k_key <= k_border)).to(tl.int64)
    inside = (k_key <= k_border) & ((p_key < p_border) | (at_border & (place <= last)))
    return tl.where(inside, masses, 0)


@triton.jit
def _first_to_reach(
    source, size, peak, inverse, need, k_border, p_border, last, ties: tl.constexpr, block: tl.constexpr
):
    """The first place up to which the measure sums to `need`."""
    start = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int64)
    measures = _measure(source, start, size, peak, inverse, k_border, p_border, last, ties, block)
    here = tl.sum(measures, axis=0)
    while (before + here < need) & (start + block < size):
        before += here
        start += block
        measures = _measure(source, start, size, peak, inverse, k_border, p_border, last, ties, block)
        here = tl.sum(measures, axis=0)
    ends = before + tl.cumsum(measures, axis=0)
    return start + tl.sum((ends < need).to(tl.int32), axis=0)


@triton.jit
def candidate_choice(source, size, peak, inverse, k, p, total, u, block: tl.constexpr):
    """The drawn place among `size` logits at `source`, which hold all that top-k (0: off), then top-p, keep.

    `total` is the mass before any filter, `u` the row's uniform.
    """
    k_border = tl.full([], _INFINITY, tl.int32)
    p_border = tl.full([], _ONE, tl.int32)
    last = tl.zeros([], tl.int32) + size
    if k > 0:
        k_border, _ = _border(source, size, peak, inverse, k, k_border, True, block)
        total = tl.zeros([], tl.int64)
        for start in range(0, size, block):
            total += tl.sum(
                _measure(source, start, size, peak, inverse, k_border, p_border, last, False, block), axis=0
            )
    if p < 1:
        wanted = p.to(tl.float64) * total.to(tl.float64)
        need = wanted.to(tl.int64)
        need = tl.minimum(tl.maximum(need + (need.to(tl.float64) < wanted).to(tl.int64), 1), total)
        p_border, before = _border(source, size, peak, inverse, need, k_border, False, block)
        each = mass((-p_border + _ONE).to(tl.float32, bitcast=True))
        ties = (need - before + each - 1) // tl.maximum(each, 1)
        last = _first_to_reach(source, size, peak, inverse, ties, k_border, p_border, last, True, block)
        total = before + ties * each
    target = pick(u, total)
    return _first_to_reach(source, size, peak, inverse, target + 1, k_border, p_border, last, False, block)
