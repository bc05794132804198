"""Moves that several policies make: whom to admit, which tokens to prefill, how to keep decode going.

Knows nothing about partitions or targets. Each is a pure function of the snapshot.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from bulletserve.core.plan import DecodeStep, PrefillGroup
from bulletserve.core.snapshot import (
    MAX_BATCH_PROMPTS,
    MAX_BATCH_TOKENS,
    MAX_RANGE_TOKENS,
    AdmittedEntry,
    Snapshot,
    WaitingEntry,
)

OVERTAKE_S = 2.0
"""How long smaller requests may pass one that does not fit; after that the queue waits for it."""

TokenRanges = tuple[tuple[int, int], ...]


def admissions(snapshot: Snapshot, tokens: int, entries: Iterable[WaitingEntry] | None = None) -> tuple[int, ...]:
    """Waiting requests worth about `tokens` tokens, at least one, whose prompts fit in the free blocks.

    A block per running request stays free, so that those who run are not preempted by those who come. A request
    that does not fit lets smaller ones pass, but not for ever.
    """
    running = snapshot.decode_rows + snapshot.prefilling_rows
    free = snapshot.free_blocks - running
    chosen: list[int] = []
    for entry in chain(snapshot.waiting, snapshot.late) if entries is None else entries:
        if len(chosen) >= snapshot.free_seats or tokens <= 0:
            break
        if entry.prompt_blocks <= free:
            chosen.append(entry.request_id)
            free -= entry.prompt_blocks
            tokens -= entry.tokens_left
        elif snapshot.now_s - entry.arrival_s > OVERTAKE_S:
            break
    queue = snapshot.waiting or snapshot.late
    if not chosen and queue and snapshot.free_seats and not (running or snapshot.admitted):
        head = queue[0]
        if head.prompt_blocks <= snapshot.free_blocks:
            chosen.append(head.request_id)
    return tuple(chosen)


def prompt_ranges(
    snapshot: Snapshot, tokens: int, entries: Sequence[AdmittedEntry] | None = None
) -> tuple[tuple[int, ...], TokenRanges]:
    """The next ranges of admitted prompts, oldest first, together at most `tokens` tokens and no more than may be."""
    requests: list[int] = []
    ranges: list[tuple[int, int]] = []
    tokens = min(tokens, MAX_BATCH_TOKENS)
    for entry in (snapshot.admitted if entries is None else entries)[:MAX_BATCH_PROMPTS]:
        if tokens <= 0:
            break
        start = entry.computed_tokens
        end = min(entry.prompt_tokens, start + min(tokens, MAX_RANGE_TOKENS))
        requests.append(entry.request_id)
        ranges.append((start, end))
        tokens -= end - start
    return tuple(requests), tuple(ranges)


def admitted_tokens(snapshot: Snapshot) -> int:
    """Tokens that admitted requests still have to prefill."""
    return sum(entry.tokens_left for entry in snapshot.admitted)


def next_group(
    snapshot: Snapshot,
    tokens: int,
    sms: int,
    *,
    whole: bool = False,
    entries: Sequence[AdmittedEntry] | None = None,
) -> PrefillGroup | None:
    """The next layer group: of the batch under way, else of a new batch of at most `tokens` tokens.

    A group's layers are chosen so that tokens times layers come near the device's group size; `whole`, or a batch small
    enough for it: all layers.
    """
    limits = snapshot.limits
    if snapshot.prefill is not None:
        batch = snapshot.prefill
        requests, ranges, first = batch.requests, batch.token_ranges, batch.next_layer
    else:
        requests, ranges = prompt_ranges(snapshot, tokens, entries)
        first = 0
        if not requests:
            return None
    size = sum(end - start for start, end in ranges)
    whole = whole or size <= limits.one_group_tokens
    layers = limits.num_layers if whole else max(1, round(limits.group_token_layers / size))
    end = min(limits.num_layers, first + layers)
    if limits.num_layers - end <= layers // 2:
        end = limits.num_layers
    return PrefillGroup(requests, ranges, (first, end), sms)


def decode_or_preempt(snapshot: Snapshot, sms: int) -> tuple[DecodeStep | None, tuple[int, ...]]:
    """The next decode step, and whom to preempt so that its rows have blocks.

    The last to arrive goes first, and the first of all is no victim, so the oldest always gets on. No step while the
    blocks that are missing are on their way back.
    """
    if not snapshot.decode_rows:
        return None, ()
    victims, rows, missing = make_room(snapshot)
    if missing > 0 or not rows:
        return None, victims
    return DecodeStep(sms), victims


def make_room(snapshot: Snapshot) -> tuple[tuple[int, ...], int, int]:
    """Victims, decode rows that are left, and blocks still missing for their next step.

    A victim's blocks come back when its started steps have run; what it would have needed is spared at once.
    """
    rows, missing = snapshot.decode_rows, snapshot.decode_blocks_needed - snapshot.free_blocks
    if missing <= 0:
        return (), rows, missing
    chosen: list[int] = []
    coming = snapshot.returning_blocks
    for victim in snapshot.victims:
        if coming >= missing:
            break
        chosen.append(victim.request_id)
        coming += victim.blocks
        if victim.decoding:
            rows -= 1
            missing -= victim.needs_block
    return tuple(chosen), rows, missing
