"""The search over partitions and chunks: which ways keep a limit on the decode step, and which of them to take.

Knows nothing about where the limit comes from. A decode step takes longer on a smaller share and with a larger chunk,
and costs the less the longer it takes, with few exceptions; so what is nearest to the limit is what is wanted.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from math import inf

from bulletserve.core.partition import Partition
from bulletserve.scheduler.outlook import Batch, Outlook, Prompts
from bulletserve.scheduler.ways import Way, beside_s, mixed, split

TILE_TOKENS = 128
"""Rows of a matrix product come in tiles of so many: mixed steps that fill them waste nothing."""

PROMPT_TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Sizes of a mixed step's part of prompts that are tried, in tiles beyond those of the decode rows."""

LEAST_NEED = 0.05
"""Prefill always counts as needing so much of the device: somebody waits for it."""


def splits_within(
    outlook: Outlook, batch: Batch, partitions: Sequence[Partition], limit_s: float, decode_sms: int
) -> list[Way]:
    """The split with the smallest decode share that keeps the limit; none if none keeps it. `partitions` by rising
    prefill share. Looks first at the one that gives decode `decode_sms`, which is in use, and goes on from there."""
    if not partitions:
        return []
    at = next((place for place, each in enumerate(partitions) if each.decode_sms == decode_sms), len(partitions) // 2)
    keeps = beside_s(outlook, batch, partitions[at]) <= limit_s
    if keeps:
        while at + 1 < len(partitions) and beside_s(outlook, batch, partitions[at + 1]) <= limit_s:
            at += 1
    while not keeps and at > 0:
        at -= 1
        keeps = beside_s(outlook, batch, partitions[at]) <= limit_s
    return [split(outlook, batch, partitions[at])] if keeps else []


def mixed_within(
    outlook: Outlook,
    prompts: Prompts,
    rows: int,
    most_tokens: int,
    limit_s: float,
    most_price_s: Callable[[], float] = lambda: inf,
) -> list[Way]:
    """A mixed step with nearly the largest chunk that keeps the limit, at a whole number of tiles (or all there is);
    none if not even one tile keeps it. Looks first where the limit would be if a chunk took the time that it takes by
    itself, then where it is if the rest of a chunk does, and from there only down: each size is a forecast that nobody
    has asked for before. None too where a chunk that is too large costs more than `most_price_s`: smaller ones do, too.
    What that is, is asked only where it matters.
    """
    there = min(most_tokens, sum(new for new, _ in prompts))
    if there <= 0:
        return []
    least = (rows // TILE_TOKENS + 1) * TILE_TOKENS - rows
    sizes = [size for tiles in PROMPT_TILES if (size := least + (tiles - 1) * TILE_TOKENS) < there]
    sizes.append(there)
    guess = (limit_s - outlook.decode_alone_s) / outlook.token_s
    at = min(bisect_left(sizes, guess), len(sizes) - 1)
    first = mixed(outlook, cut(prompts, sizes[at]))
    if first.decode_s > limit_s and first.price_s > most_price_s():
        return []
    guess = sizes[at] + (limit_s - first.decode_s) / outlook.token_s
    better = bisect_right(sizes, guess) - 1
    lowest = at if first.decode_s <= limit_s else -1
    for place in range(better if lowest == at else min(better, at - 1), lowest, -1):
        way = mixed(outlook, cut(prompts, sizes[place]))
        if way.decode_s <= limit_s:
            return [way]
    return [first] if lowest == at else []


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


def balanced(ways: Sequence[Way], limit_s: float, need: float, wait_s: float = 0.0) -> Way:
    """Where no way keeps both targets: the one that leaves the worse off of the two phases with the greatest part of
    what it needs, decode a step each `limit_s`, prefill the share `need` of the whole device's speed. `wait_s`: how
    much later a step on the whole device would begin than one on a share."""

    def worst(way: Way) -> float:
        interval_s = max(way.decode_s + (0.0 if way.kind == "split" else wait_s), limit_s)
        prefill = (1.0 - way.price_s / interval_s) / max(need, LEAST_NEED)
        return min(prefill, limit_s / interval_s)

    return max(ways, key=worst)
