"""All that a policy may look at, frozen at one moment.

Knows nothing about tokens or tensors. Counts and lengths are *projected*: they hold what will be true once
every started step has run, because decisions are made one step ahead. A snapshot costs no work per running
request to make: its tuples are shared with the state until they change.
"""

from dataclasses import dataclass
from typing import NamedTuple

from bulletserve.core.correction import Correction
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import MOST_SMS, Lattice, Partition
from bulletserve.core.slo import NO_DEADLINE_S

WAITING_SHOWN = 32
"""How many waiting requests, and how many late ones, a snapshot shows, in the order of the queue."""

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


MOST_BLOCKS = 1 << 24
"""Cache blocks of one engine: a ledger of them takes half a gigabyte. The largest card with the smallest model has half
as many, one token each."""

MOST_BLOCK_TOKENS = 1024
MOST_SEQS = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """What does not change while the engine runs.

    `group_token_layers`: tokens times layers that make a prefill layer group of the wanted duration.
    `batch_tokens`: tokens at which a prefill batch keeps the device's arithmetic busy. `one_group_tokens`: a batch of
    up to so many tokens is one group over all layers. `captured_rows`: larger steps with prompt tokens are launched
    kernel by kernel, which may take the host longer than the device.
    """

    num_layers: int
    block_size: int
    total_blocks: int
    max_seqs: int
    group_token_layers: int
    batch_tokens: int
    lattice: Lattice
    one_group_tokens: int = 0
    captured_rows: int = 2 * MAX_BATCH_TOKENS


def check_limits(limits: Limits) -> None:
    """Raise `ValueError` for an engine that cannot be. Limits come out of files too, and others allocate by them."""
    total = limits.lattice.total_sms
    for name, least, most in (
        ("num_layers", 1, 10_000),
        ("block_size", 1, MOST_BLOCK_TOKENS),
        ("total_blocks", 1, MOST_BLOCKS),
        ("max_seqs", 1, MOST_SEQS),
        ("group_token_layers", 1, 1 << 53),
        ("batch_tokens", 1, 1 << 31),
        ("one_group_tokens", 0, 1 << 31),
        ("captured_rows", 0, 1 << 31),
    ):
        value = getattr(limits, name)
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}, not from {least} to {most}")
    if not 1 <= total <= MOST_SMS:
        raise ValueError(f"total_sms is {total}, not from 1 to {MOST_SMS}")
    shares = [share for partition in limits.lattice.partitions for share in partition]
    if not all(0 <= share <= total for share in shares):
        raise ValueError(f"a partition of {total} SMs has more than these, or fewer than none")
    if not {Partition(total, 0), Partition(0, total)} <= set(limits.lattice.partitions):
        raise ValueError("no partition gives one lane everything")


class WaitingEntry(NamedTuple):
    """A request in the queue. `prompt_tokens` counts what must be in the cache before its next token.

    `deadline_s`: when its first token is due (of a preempted request, its next). `lost_s`: the last moment at which
    that can still be kept, by the forecast of its prompt alone on the whole device. `tpot_s`: its target.
    `cached_tokens`: what the prefix cache is thought to have of the prompt.
    """

    request_id: int
    arrival_s: float
    prompt_tokens: int
    prompt_blocks: int
    deadline_s: float
    slo_class: str
    priority: int = 0
    preempted: bool = False
    tpot_s: float = NO_DEADLINE_S
    lost_s: float = NO_DEADLINE_S
    cached_tokens: int = 0

    @property
    def tokens_left(self) -> int:
        """Prompt tokens still to be read."""
        return self.prompt_tokens - self.cached_tokens


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
    tpot_s: float = NO_DEADLINE_S

    @property
    def tokens_left(self) -> int:
        """Prompt tokens still to be read."""
        return self.prompt_tokens - self.computed_tokens


class PrefillProgress(NamedTuple):
    """The prefill batch that is between its first and last layer.

    `finishing`: prompts that end with it. `deadline_s` and `tpot_s`: the earliest and the least among its requests.
    """

    requests: tuple[int, ...]
    token_ranges: tuple[tuple[int, int], ...]
    next_layer: int
    finishing: int = 0
    deadline_s: float = NO_DEADLINE_S
    tpot_s: float = NO_DEADLINE_S

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return sum(end - start for start, end in self.token_ranges)


class ClassLoad(NamedTuple):
    """The decode rows of one SLO class.

    `least_slack_s`: how long after `now_s` the most pressed row's next token may come before its mean TPOT misses the
    target, that token counted; tokens of started steps are taken as told. `tpot_s`: the target.
    """

    slo_class: str
    rows: int
    context_tokens: int
    least_slack_s: float
    tpot_s: float = NO_DEADLINE_S


class Victim(NamedTuple):
    """A request that may be preempted: the cache blocks that frees, and whether its next step needs one more."""

    request_id: int
    blocks: int
    needs_block: bool
    decoding: bool


class StepUnderWay(NamedTuple):
    """A step started and not finished. `since_s`: it cannot have been running before: when it was started, or when the
    step before it on its lane ended."""

    shape: StepShape
    sms: int
    since_s: float


class LaneState(NamedTuple):
    """A lane's queue: steps started and not finished, in order (a mixed step is on both lanes), the share of the last
    one started and whether it was mixed, and when a step last ended (or, of decode, its first row joined, if that was
    later): together, what a policy chose last."""

    steps: tuple[StepUnderWay, ...] = ()
    sms: int = 0
    mixed: bool = False
    free_s: float = 0.0

    @property
    def queued(self) -> int:
        """How many steps."""
        return len(self.steps)


class Snapshot(NamedTuple):
    """The state of the engine at `now_s` (seconds of the loop's clock).

    `waiting` and `late` are the heads of the queue: those whose first token can still be in time (or was promised at no
    time), and those for whom it is too late; `late` is empty where admission makes no difference between them.
    `waiting_tokens`: prompt tokens that all `waiting_total` have left. `correction`: factors on forecasts, from steps.
    `answer_tokens`: a length that nine of ten answers reach, by those that have ended lately; 0 before the first.
    `victims` and `returning_blocks` (cache blocks that come back when started steps end) are filled in only while
    the next decode step needs more blocks than are free.
    """

    now_s: float
    limits: Limits
    waiting: tuple[WaitingEntry, ...]
    waiting_total: int
    waiting_tokens: int
    late: tuple[WaitingEntry, ...]
    late_total: int
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
    correction: Correction = Correction()
    answer_tokens: int = 0
