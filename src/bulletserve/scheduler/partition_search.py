"""The search over partitions and chunks: which ways keep a limit on the decode step, and which of them to take.

Knows nothing about where the limit comes from. A decode step takes longer on a smaller share and with a larger chunk,
so both searches halve their range; and near the limit the price hardly changes, so the two nearest to it are enough.
"""

from collections.abc import Callable, Sequence

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.scheduler.outlook import Outlook, Prompts
from bulletserve.scheduler.ways import Way, mixed, split

TILE_TOKENS = 128
"""Rows of a matrix product come in tiles of so many: mixed steps that fill them waste nothing."""

LEAST_NEED = 0.05
"""Prefill always counts as needing so much of the device: somebody waits for it."""


def splits_within(outlook: Outlook, batch: StepShape, partitions: Sequence[Partition], limit_s: float) -> list[Way]:
    """The split with the smallest decode share that keeps the limit and the next larger one; none if none keeps it.
    `partitions` by rising prefill share."""
    return _nearest(lambda at: split(outlook, batch, partitions[at]), len(partitions), limit_s)


def mixed_within(outlook: Outlook, prompts: Prompts, rows: int, most_tokens: int, limit_s: float) -> list[Way]:
    """The mixed step with the largest chunk that keeps the limit, at a whole number of tiles (or all there is), and the
    next smaller one; none if not even one tile keeps it."""
    there = min(most_tokens, sum(new for new, _ in prompts))
    if there <= 0:
        return []
    first = (rows // TILE_TOKENS + 1) * TILE_TOKENS - rows
    sizes = [*range(first, there, TILE_TOKENS), there]
    return _nearest(lambda at: mixed(outlook, cut(prompts, sizes[at])), len(sizes), limit_s)


def _nearest(way: Callable[[int], Way], count: int, limit_s: float) -> list[Way]:
    """The last way whose step keeps the limit, and the one before it, of `count` whose steps take ever longer."""
    found: dict[int, Way] = {}
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        found[middle] = way(middle)
        if found[middle].decode_s <= limit_s:
            low = middle + 1
        else:
            high = middle
    return [found[at] if at in found else way(at) for at in (low - 1, low - 2) if at >= 0]


def cut(prompts: Prompts, tokens: int) -> list[tuple[int, int]]:
    """The first `tokens` tokens of a sequence of prompts."""
    parts: list[tuple[int, int]] = []
    for new, before in prompts:
        if tokens <= 0:
            break
        parts.append((min(new, tokens), before))
        tokens -= new
    return parts


def cheapest(ways: Sequence[Way], discount: Callable[[Way], float]) -> Way:
    """The least price, times what `discount` says."""
    return min(ways, key=lambda way: way.price_s * discount(way))


def balanced(ways: Sequence[Way], limit_s: float, need: float) -> Way:
    """Where no way keeps both targets: the one that leaves the worse off of the two phases with the greatest part of
    what it needs, decode a step each `limit_s`, prefill the share `need` of the whole device's speed."""

    def worst(way: Way) -> float:
        interval_s = max(way.decode_s, limit_s)
        prefill = (1.0 - way.price_s / interval_s) / max(need, LEAST_NEED)
        return min(prefill, limit_s / interval_s)

    return max(ways, key=worst)
