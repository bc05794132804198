"""One request's life inside the engine, as numbers.

Knows nothing about other requests. Counts come in two tenses: *projected* ones (`computed`, `kv_tokens`) hold what
started steps will have done, because decisions are made one step ahead; `tokens` and `settled` hold what is known.
"""

from array import array
from collections.abc import Sequence
from enum import Enum

from bulletserve.core.launch import Seat
from bulletserve.core.prefix import next_hash, root_hash
from bulletserve.core.request import Request
from bulletserve.core.slo import NO_DEADLINE_S
from bulletserve.core.snapshot import AdmittedEntry, Limits, WaitingEntry
from bulletserve.core.token_rules import NO_TOKEN


class Phase(Enum):
    """Where a request is. A preempted request goes back to WAITING by way of LEAVING."""

    WAITING = "in the queue, holding nothing"
    ADMITTED = "blocks and seat reserved, in no started prefill batch"
    PREFILLING = "in the started prefill batch, or its first token is being drawn and it has joined no step"
    DECODING = "a row of every decode step, but for the time in which its next token's mask is made"
    LEAVING = "in no further step; holds its blocks until the last started one has run"


class Job:
    """The mutable record of one request.

    tokens: prompt and what was generated, `most_tokens` in the end; an array, because thousands of int objects a turn
    would have to be freed one by one. target: tokens that must be in the cache before the next token can be drawn.
    stop_ids: what ends it, were it that no token is possible.
    speaking: its prompt is computed, and so are all known tokens but the last. last_step: the last started step that
    may touch its blocks. kv_tokens: projected tokens in the cache, from its prompt's last layer on; while it is a row
    of the `DecodeSet`, as of the step `joined_at` of that set. masked: it has a grammar; mask: what that allows for the
    next token. expected: how much of it the prefix cache had when it was looked up last, awaits: the name of the first
    block that was not there.
    """

    __slots__ = (
        "awaits",
        "cached",
        "computed",
        "ended",
        "expected",
        "first_token_s",
        "hashes",
        "id",
        "joined_at",
        "kv_tokens",
        "last_step",
        "mask",
        "masked",
        "most_tokens",
        "phase",
        "prompt_tokens",
        "request",
        "seat",
        "seated",
        "settled",
        "slack_key_s",
        "speaking",
        "stop_ids",
        "target",
        "tokens",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.id = request.id
        self.stop_ids = request.stop_ids | {NO_TOKEN}
        self.tokens = array("q", request.prompt_ids)
        self.hashes = list(request.block_hashes)
        self.prompt_tokens = len(self.tokens)
        self.most_tokens = self.prompt_tokens + request.max_tokens
        self.phase = Phase.WAITING
        self.target = self.prompt_tokens
        self.seat = -1
        self.seated = False
        self.cached = 0
        self.computed = 0
        self.settled = 0
        self.kv_tokens = 0
        self.joined_at = 0
        self.last_step = -1
        self.ended = False
        self.speaking = False
        self.first_token_s: float | None = None
        self.slack_key_s = 0.0
        self.masked = bool(request.grammar)
        self.mask = b""
        self.expected = 0
        self.awaits = b""

    def never_ends(self, limits: Limits) -> str:
        """Why it could not end even if it were alone; "" if it could."""
        longest = self.most_tokens - 1
        room = limits.total_blocks * limits.block_size
        if longest > room:
            return f"prompt and answer need room for {longest} tokens in the cache, which holds {room}"
        if not self.prompt_tokens or self.request.max_tokens < 1:
            return "a request needs a prompt and at least one token to make"
        return ""

    @property
    def is_full(self) -> bool:
        """Whether started steps already draw its last allowed token."""
        return self.kv_tokens + 1 >= self.most_tokens

    @property
    def deadline_s(self) -> float:
        """When its next token is due: the first by its TTFT, one after a preemption by its mean TPOT."""
        request = self.request
        slo = request.slo
        if self.first_token_s is None:
            return slo.ttft_deadline_s(request.arrival_s, self.prompt_tokens)
        if slo.tpot_s is None:
            return NO_DEADLINE_S
        return self.first_token_s + (len(self.tokens) - self.prompt_tokens) * slo.tpot_s

    def waiting_entry(self, block_size: int, prompt_s: float) -> WaitingEntry:
        """Its entry in the queue; `prompt_s`: the shortest time in which the rest of its prompt can be read."""
        request = self.request
        deadline_s = self.deadline_s
        return WaitingEntry(
            request.id,
            request.arrival_s,
            self.target,
            -(-self.target // block_size),
            deadline_s,
            request.slo.name,
            request.priority,
            len(self.tokens) > self.prompt_tokens,
            NO_DEADLINE_S if request.slo.tpot_s is None else request.slo.tpot_s,
            NO_DEADLINE_S if deadline_s >= NO_DEADLINE_S else deadline_s - prompt_s,
            self.expected,
        )

    def admitted_entry(self) -> AdmittedEntry:
        """Its entry among the admitted."""
        request = self.request
        slo = request.slo
        tpot_s = NO_DEADLINE_S if slo.tpot_s is None else slo.tpot_s
        return AdmittedEntry(
            request.id, request.arrival_s, self.target, self.computed, self.deadline_s, slo.name, tpot_s
        )

    def take_seat(self, seat: int, cached_tokens: int) -> None:
        """Admitted: blocks are reserved and the first `cached_tokens` are in the cache."""
        self.seat = seat
        self.seated = False
        self.cached = self.computed = self.settled = cached_tokens

    def seat_card(self, blocks: Sequence[int]) -> Seat:
        """What the device must know of it."""
        request = self.request
        return Seat(
            self.seat,
            request.id,
            request.prompt_ids if self.target == self.prompt_tokens else self.tokens[:],
            self.cached,
            tuple(blocks),
            request.temperature,
            request.top_p,
            request.top_k,
            request.seed,
            request.rules,
            self.prompt_tokens,
        )

    def leave_seat(self) -> None:
        """Out of every step: if it was preempted, everything is computed again later."""
        self.phase = Phase.WAITING
        self.target = len(self.tokens)
        self.seat = -1
        self.speaking = False
        self.cached = self.computed = self.settled = self.kv_tokens = 0

    def findable_names(self, block_size: int) -> list[bytes]:
        """The hashes of the blocks that may be in the cache already: one token at least is left to compute, and all
        whose likelihood is to be told."""
        rules = self.request.rules
        if rules is not None and rules.prompt_logprobs is not None:
            return []
        findable = (self.target - 1) // block_size
        return self.block_names(findable, block_size)[:findable]

    def block_names(self, blocks: int, block_size: int) -> list[bytes]:
        """The hashes of at least its first `blocks` blocks, all of whose tokens are known."""
        while len(self.hashes) < blocks:
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else root_hash(self.request.cache_salt)
            self.hashes.append(next_hash(parent, self.tokens[start : start + block_size]))
        return self.hashes
