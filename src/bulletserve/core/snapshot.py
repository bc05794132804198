"""All that a policy may look at, frozen at one moment.

Knows nothing about tokens or tensors. Counts and lengths are *projected*: they hold what will be true once
every started step has run, because decisions are made one step ahead. A snapshot costs no work per running
request to make: its tuples are shared with the state until they change.
"""

from dataclasses import dataclass
from typing import NamedTuple

from bulletserve.core.partition import Lattice

WAITING_SHOWN = 32
"""How many waiting requests a snapshot shows, in the order of the queue."""

VICTIMS_SHOWN = 8
"""How many of the cheapest preemption victims a snapshot shows."""

MAX_RANGE_TOKENS = 4096
"""Longest token range of one prompt in one prefill batch: its ends are where others overtake."""

MAX_BATCH_TOKENS = 8192
"""Most prompt tokens of one step, mixed or not: an engine's buffers are made for so many."""

MAX_BATCH_PROMPTS = 128
"""Most prompts of one step."""

LANE_DEPTH = 2
"""How many steps may be queued on a lane."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What does not change while the engine runs.

    `group_token_layers`: tokens times layers that make a prefill layer group of the wanted duration.
    `batch_tokens`: tokens at which a prefill batch keeps the device's arithmetic busy. `one_group_tokens`: a batch of
    up to so many tokens is one group over all layers.
    """

    num_layers: int
    block_size: int
    total_blocks: int
    max_seqs: int
    group_token_layers: int
    batch_tokens: int
    lattice: Lattice
    one_group_tokens: int = 0


class WaitingEntry(NamedTuple):
    """A request in the queue. `prompt_tokens` counts what must be in the cache before its next token."""

    request_id: int
    arrival_s: float
    prompt_tokens: int
    prompt_blocks: int
    deadline_s: float
    slo_class: str
    priority: int = 0
    preempted: bool = False


class AdmittedEntry(NamedTuple):
    """A request with its blocks reserved and its prompt not yet finished, in no started batch.

    `computed_tokens` are in the cache already, by the prefix cache or by an earlier token range.
    """

    request_id: int
    arrival_s: float
    prompt_tokens: int
    computed_tokens: int
    deadline_s: float
    slo_class: str


class PrefillProgress(NamedTuple):
    """The prefill batch that is between its first and last layer."""

    requests: tuple[int, ...]
    token_ranges: tuple[tuple[int, int], ...]
    next_layer: int

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return sum(end - start for start, end in self.token_ranges)


class ClassLoad(NamedTuple):
    """The decode rows of one SLO class.

    `least_slack_s`: how long the most pressed row may pause before its mean TPOT misses the target, at `now_s`.
    """

    slo_class: str
    rows: int
    context_tokens: int
    least_slack_s: float


class Victim(NamedTuple):
    """A request that may be preempted: the cache blocks that frees, and whether its next step needs one more."""

    request_id: int
    blocks: int
    needs_block: bool
    decoding: bool


class LaneState(NamedTuple):
    """A lane's queue: steps started and not finished (a mixed step counts on both lanes), and the last share."""

    queued: int
    sms: int


class Snapshot(NamedTuple):
    """The state of the engine at `now_s` (seconds of the loop's clock).

    `victims` and `returning_blocks` (cache blocks that come back when started steps end) are filled in only while
    the next decode step needs more blocks than are free.
    """

    now_s: float
    limits: Limits
    waiting: tuple[WaitingEntry, ...]
    waiting_total: int
    admitted: tuple[AdmittedEntry, ...]
    prefill: PrefillProgress | None
    prefilling_rows: int
    decode_rows: int
    decode_tokens: int
    decode_classes: tuple[ClassLoad, ...]
    decode_blocks_needed: int
    victims: tuple[Victim, ...]
    free_blocks: int
    returning_blocks: int
    free_seats: int
    prefill_lane: LaneState
    decode_lane: LaneState
