"""The ways to let a prompt and the running answers share the device, on one yardstick.

Knows nothing about queues. A decode step beside or within prefill has a *price*: the time it takes, less the time that
the whole device would have needed for the prefill that is done in it. Whatever else the device does with the time is
prefill at full speed, so of all ways that keep the pace of the answers, the cheapest step leaves most for prompts:

    split      each lane on its share for as long as the decode step takes
    sliced     prefill stops, decode has the whole device: the price is the step's whole time
    mixed      a chunk of the prompt rides in the decode step
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.scheduler.outlook import Outlook, Prompts

TILE_TOKENS = 128
"""Rows of a matrix product come in tiles of so many: mixed steps that fill them waste nothing."""


class Way(NamedTuple):
    """How the next decode step runs: with which partition, how long it takes and what it costs; `tokens`: of the prompts
    in a mixed step."""

    kind: Literal["split", "sliced", "mixed"]
    partition: Partition
    decode_s: float
    price_s: float
    tokens: int = 0

    def describe(self) -> str:
        """For people."""
        what = f"{self.tokens} prompt tokens in" if self.kind == "mixed" else f"{self.partition.decode_sms} SMs for"
        return (
            f"{self.kind}, {what} a decode step of {self.decode_s * 1e3:.1f} ms at a price of {self.price_s * 1e3:.1f}"
        )


def sliced(outlook: Outlook) -> Way:
    """Decode on the whole device while prefill waits."""
    alone_s = outlook.decode_alone_s
    return Way("sliced", Partition(0, outlook.total_sms), alone_s, alone_s)


def split(outlook: Outlook, batch: StepShape, partition: Partition) -> Way:
    """Decode beside a prefill batch."""
    decode_s = outlook.seconds(outlook.decode, partition, batch)
    speed = outlook.seconds(batch, outlook.whole) / outlook.seconds(batch, partition, outlook.decode)
    return Way("split", partition, decode_s, decode_s * (1.0 - speed))


def mixed(outlook: Outlook, prompts: Prompts) -> Way:
    """A chunk of prompts in the decode step."""
    tokens = sum(new for new, _ in prompts)
    took_s = outlook.mixed_s(prompts)
    return Way("mixed", outlook.whole, took_s, took_s - tokens * outlook.token_s, tokens)


def splits_within(outlook: Outlook, batch: StepShape, partitions: Sequence[Partition], limit_s: float) -> list[Way]:
    """The split with the smallest decode share that keeps the limit, and the next larger one, which may be cheaper;
    none if none keeps it. `partitions` by falling decode share."""
    low, high = 0, len(partitions)  # all below `low` keep it, all from `high` on do not
    ways: dict[int, Way] = {}
    while low < high:
        middle = (low + high) // 2
        ways[middle] = split(outlook, batch, partitions[middle])
        if ways[middle].decode_s <= limit_s:
            low = middle + 1
        else:
            high = middle
    return [ways[at] if at in ways else split(outlook, batch, partitions[at]) for at in (low - 1, low - 2) if at >= 0]


def cut(prompts: Prompts, tokens: int) -> list[tuple[int, int]]:
    """The first `tokens` tokens of a sequence of prompts."""
    parts: list[tuple[int, int]] = []
    for new, before in prompts:
        if tokens <= 0:
            break
        parts.append((min(new, tokens), before))
        tokens -= new
    return parts


def mixed_within(outlook: Outlook, prompts: Prompts, rows: int, most_tokens: int, limit_s: float) -> list[Way]:
    """The mixed step with the largest chunk that keeps the limit, at a whole number of tiles (or all there is), and the
    next smaller one; none if not even one tile fits."""
    there = min(most_tokens, sum(new for new, _ in prompts))
    first = (rows // TILE_TOKENS + 1) * TILE_TOKENS - rows
    sizes = [*range(first, there, TILE_TOKENS), there]
    low, high = 0, len(sizes)
    ways: dict[int, Way] = {}
    while low < high:
        middle = (low + high) // 2
        ways[middle] = mixed(outlook, cut(prompts, sizes[middle]))
        if ways[middle].decode_s <= limit_s:
            low = middle + 1
        else:
            high = middle
    return [ways[at] if at in ways else mixed(outlook, cut(prompts, sizes[at])) for at in (low - 1, low - 2) if at >= 0]
