"""What is worth most where nobody waits for a target and many prompts wait: the most work per second.

Knows nothing about queues. A prompt's token is worth the time that it takes in a batch that keeps the device busy, an
answer's token the time that it takes with as many rows as there can be: until then a decode step is better put off,
since the same step for more rows costs little more. So a way's *rate* is the work done in a step over its time; prefill
by itself has rate 1, and a way with less than that is not worth taking.
"""

from bulletserve.core.operators import StepShape
from bulletserve.core.snapshot import Snapshot
from bulletserve.scheduler.outlook import Outlook, Prompts
from bulletserve.scheduler.partition_search import TILE_TOKENS, cut
from bulletserve.scheduler.ways import Way, mixed

BACKLOG_BATCHES = 4
"""Prompts for so many full batches wait: it is throughput that counts."""

STEP_TILES = (2, 4, 8, 16, 32, 64)
"""Sizes of mixed steps that are tried, decode rows included, in tiles."""


def is_backlog(snapshot: Snapshot) -> bool:
    """Whether enough prompts wait to keep the device busy for a good while."""
    return snapshot.waiting_tokens >= BACKLOG_BATCHES * snapshot.limits.batch_tokens


def step_worth_s(snapshot: Snapshot, outlook: Outlook) -> float:
    """What a decode step of the rows that there are is worth: their part of one with all the rows that there can be,
    which are limited by seats, by blocks and by the requests that there are. There must be rows."""
    rows, tokens = snapshot.decode_rows, snapshot.decode_tokens
    blocks_a_row = -(-tokens // (rows * snapshot.limits.block_size)) or 1
    coming = snapshot.prefilling_rows + len(snapshot.admitted) + snapshot.waiting_total
    most = rows + min(coming, snapshot.free_seats, snapshot.free_blocks // blocks_a_row)
    shape = StepShape.decode(most, (tokens + rows) * most // rows, snapshot.limits.num_layers)
    return outlook.seconds(shape, outlook.whole) * rows / most


def rate(way: Way, worth_s: float) -> float:
    """Seconds of work done in a second."""
    return (way.decode_s - way.price_s + worth_s) / way.decode_s


def mixed_ways(outlook: Outlook, prompts: Prompts, rows: int, limit_s: float) -> list[Way]:
    """Mixed steps of all sizes that keep a limit."""
    there = sum(new for new, _ in prompts)
    sizes = {min(tiles * TILE_TOKENS - rows, there) for tiles in STEP_TILES}
    ways = (mixed(outlook, cut(prompts, size)) for size in sorted(sizes) if size > 0)
    return [way for way in ways if way.decode_s <= limit_s]
