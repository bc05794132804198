"""The rules of a plan, checked before anything is started.

Knows nothing about policies. Every rule is decidable from the snapshot alone, so a plan that passes can be carried
out whatever happens meanwhile, and a third party's policy cannot harm a running engine: it is told what it did.
"""

from collections.abc import Iterable, Sequence

from bulletserve.core.errors import PlanError
from bulletserve.core.plan import DecodeStep, Lane, MixedStep, Plan, PrefillGroup, Start, lanes_of
from bulletserve.core.snapshot import (
    LANE_DEPTH,
    MAX_RANGE_TOKENS,
    AdmittedEntry,
    Snapshot,
    Victim,
    WaitingEntry,
)

_Entry = WaitingEntry | AdmittedEntry | Victim


def plan_check(snapshot: Snapshot, plan: Plan) -> None:
    """Raise `PlanError` naming the broken rule unless the plan may be carried out."""
    _check_choices(snapshot, plan)
    seen: set[Lane] = set()
    for start in plan.starts:
        for lane in lanes_of(start):
            _require(lane not in seen, "two starts on the {} lane in one plan", lane)
            seen.add(lane)
        _check_lane(snapshot, start)
        if isinstance(start, PrefillGroup):
            _check_group(snapshot, start, plan.preempt)
        elif isinstance(start, MixedStep):
            _check_mixed(snapshot, start, plan.preempt)
        if isinstance(start, DecodeStep | MixedStep):
            _check_rows(snapshot, start, plan)
    _check_blocks(snapshot, plan)


def _require(holds: bool, rule: str, *values: object) -> None:
    if not holds:
        raise PlanError(rule.format(*values))


def _require_known(ids: Sequence[int], entries: Iterable[_Entry], what: str) -> None:
    if not ids:
        return
    known = {entry.request_id for entry in entries}
    _require(len(set(ids)) == len(ids), "{}: a request is named twice", what)
    for request_id in ids:
        _require(request_id in known, "{}: request {} cannot be chosen", what, request_id)


def _check_choices(snapshot: Snapshot, plan: Plan) -> None:
    refused = tuple(refusal.request_id for refusal in plan.refuse)
    _require_known(plan.admit, snapshot.waiting, "admit")
    _require_known(refused, snapshot.waiting, "refuse")
    _require(not set(plan.admit) & set(refused), "a request is both admitted and refused")
    _require_known(plan.preempt, snapshot.victims, "preempt")
    _require(len(plan.admit) <= snapshot.free_seats, "more requests admitted than seats are free")


def _check_lane(snapshot: Snapshot, start: Start) -> None:
    lattice = snapshot.limits.lattice
    for lane in lanes_of(start):
        state = snapshot.prefill_lane if lane is Lane.PREFILL else snapshot.decode_lane
        _require(state.queued < LANE_DEPTH, "the {} lane is {} steps deep already", lane, LANE_DEPTH)
    if isinstance(start, MixedStep):
        _require(start.sms == lattice.total_sms, "a mixed step takes the whole device")
    elif isinstance(start, PrefillGroup):
        _require(start.sms in lattice.prefill_shares, "no partition gives prefill {} SMs", start.sms)
    else:
        _require(start.sms in lattice.decode_shares, "no partition gives decode {} SMs", start.sms)


def _check_group(snapshot: Snapshot, start: PrefillGroup, preempted: Sequence[int]) -> None:
    first, end = start.layer_range
    _require(0 <= first < end <= snapshot.limits.num_layers, "no such layers: {} to {}", first, end)
    if snapshot.prefill is None:
        _require(first == 0, "a new batch starts at its first layer")
        _check_ranges(snapshot, start.requests, start.token_ranges, preempted)
        return
    progress = snapshot.prefill
    _require(start.requests == progress.requests, "another batch is between its first and last layer")
    _require(start.token_ranges == progress.token_ranges, "a batch keeps its token ranges")
    _require(first == progress.next_layer, "the batch goes on at layer {}, not {}", progress.next_layer, first)


def _check_mixed(snapshot: Snapshot, start: MixedStep, preempted: Sequence[int]) -> None:
    _require(snapshot.prefill is None, "no mixed step while a batch is between its first and last layer")
    if start.requests:
        _check_ranges(snapshot, start.requests, start.token_ranges, preempted)
    else:
        _require(not start.token_ranges, "a token range without a request")


def _check_ranges(
    snapshot: Snapshot,
    requests: tuple[int, ...],
    ranges: tuple[tuple[int, int], ...],
    preempted: Sequence[int],
) -> None:
    admitted = {entry.request_id: entry for entry in snapshot.admitted if entry.request_id not in preempted}
    _require(bool(requests), "a prefill batch without requests")
    _require(len(requests) == len(ranges), "every request of a batch needs one token range")
    _require_known(requests, admitted.values(), "prefill")
    for request_id, (start, end) in zip(requests, ranges, strict=True):
        entry = admitted[request_id]
        _require(start == entry.computed_tokens, "request {} goes on at {}", request_id, entry.computed_tokens)
        _require(start < end <= entry.prompt_tokens, "request {} has no tokens {} to {}", request_id, start, end)
        _require(end - start <= MAX_RANGE_TOKENS, "a token range holds at most {} tokens", MAX_RANGE_TOKENS)


def _check_rows(snapshot: Snapshot, start: DecodeStep | MixedStep, plan: Plan) -> None:
    _require(start.rows in ("all", "free"), "no row is masked")
    gone = sum(v.decoding for v in snapshot.victims if v.request_id in plan.preempt)
    if isinstance(start, DecodeStep):
        _require(snapshot.decode_rows > gone, "a decode step without rows")
    else:
        _require(bool(start.requests) or snapshot.decode_rows > gone, "a mixed step without any work")


def _check_blocks(snapshot: Snapshot, plan: Plan) -> None:
    """Blocks of a victim come back later: they help no start of the same plan, but its own need falls away."""
    wanted = sum(entry.prompt_blocks for entry in snapshot.waiting if entry.request_id in plan.admit)
    if any(isinstance(start, DecodeStep | MixedStep) for start in plan.starts):
        spared = sum(v.needs_block for v in snapshot.victims if v.request_id in plan.preempt)
        wanted += snapshot.decode_blocks_needed - spared
    _require(wanted <= snapshot.free_blocks, "{} blocks wanted, {} free", wanted, snapshot.free_blocks)
