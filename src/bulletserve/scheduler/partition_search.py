"""The search over partitions and chunks: which ways keep a limit on the decode step, and which of them to take.

Knows nothing about where the limit comes from. A decode step takes longer on a smaller share and with a larger chunk,
and costs the less the longer it takes, with few exceptions; so what is nearest to the limit is what is wanted.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.scheduler.outlook import Outlook, Prompts
from bulletserve.scheduler.ways import Way, mixed, split

TILE_TOKENS = 128
"""Rows of a matrix product come in tiles of so many: mixed steps that fill them waste nothing."""

MIXED_TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Sizes of mixed steps that are tried, in tiles beyond those of the decode rows."""

LEAST_NEED = 0.05
"""Prefill always counts as needing so much of the device: somebody waits for it."""


def splits_within(
    outlook: Outlook, batch: StepShape, partitions: Sequence[Partition], limit_s: float, decode_sms: int
) -> list[Way]:
    """The split with the smallest decode share that keeps the limit; none if none keeps it. `partitions` by rising
    prefill share. Looks first at the one that gives decode `decode_sms`, which is in use, and goes on from there."""
    if not partitions:
        return []
    at = next((place for place, each in enumerate(partitions) if each.decode_sms == decode_sms), len(partitions) // 2)
    way = split(outlook, batch, partitions[at])
    if way.decode_s > limit_s:
        while way.decode_s > limit_s and at > 0:
            at -= 1
            way = split(outlook, batch, partitions[at])
        return [way] if way.decode_s <= limit_s else []
    while at + 1 < len(partitions):
        at += 1
        smaller = split(outlook, batch, partitions[at])
        if smaller.decode_s > limit_s:
            break
        way = smaller
    return [way]


def mixed_within(outlook: Outlook, prompts: Prompts, rows: int, most_tokens: int, limit_s: float) -> list[Way]:
    """The mixed step with the largest chunk that keeps the limit, at a whole number of tiles (or all there is); none if
    not even one tile keeps it. Looks first where it would be if a chunk took the time that it takes by itself."""
    there = min(most_tokens, sum(new for new, _ in prompts))
    if there <= 0:
        return []
    first = (rows // TILE_TOKENS + 1) * TILE_TOKENS - rows
    sizes = [first + (tiles - 1) * TILE_TOKENS for tiles in MIXED_TILES]
    sizes = [*sizes[: bisect_left(sizes, there)], there]
    guess = (limit_s - outlook.decode_alone_s) / outlook.token_s
    at = min(bisect_left(sizes, guess), len(sizes) - 1)
    way = mixed(outlook, cut(prompts, sizes[at]))
    if way.decode_s > limit_s:
        while way.decode_s > limit_s and at > 0:
            at -= 1
            way = mixed(outlook, cut(prompts, sizes[at]))
        return [way] if way.decode_s <= limit_s else []
    while at + 1 < len(sizes):
        at += 1
        larger = mixed(outlook, cut(prompts, sizes[at]))
        if larger.decode_s > limit_s:
            break
        way = larger
    return [way]


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
