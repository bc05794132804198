"""The rules of a plan, checked before anything is started.

Knows nothing about policies. Every rule is decidable from the snapshot alone, so a plan that passes can be carried
out whatever happens meanwhile, and a third party's policy cannot harm a running engine: it is told what it did.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

from bulletserve.core.errors import PlanError
from bulletserve.core.plan import DecodeStep, Lane, MixedStep, Plan, PrefillGroup, Start, lanes_of
from bulletserve.core.snapshot import (
    LANE_DEPTH,
    MAX_BATCH_PROMPTS,
    MAX_BATCH_TOKENS,
    MAX_RANGE_TOKENS,
    AdmittedEntry,
    Snapshot,
    Victim,
    WaitingEntry,
)

_Entry = TypeVar("_Entry", WaitingEntry, AdmittedEntry, Victim)


def plan_check(snapshot: Snapshot, plan: Plan) -> None:
    """Raise `PlanError` naming the broken rule unless the plan may be carried out."""
    admitted = _check_choices(snapshot, plan)
    seen: set[Lane] = set()
    for start in plan.starts:
        for lane in lanes_of(start):
            if lane in seen:
                raise PlanError(f"two starts on the {lane} lane in one plan")
            seen.add(lane)
        _check_lane(snapshot, start)
        if isinstance(start, PrefillGroup):
            _check_group(snapshot, start, plan.preempt)
        elif isinstance(start, MixedStep):
            _check_mixed(snapshot, start, plan.preempt)
        if not isinstance(start, PrefillGroup):
            _check_rows(snapshot, start, plan)
    _check_blocks(snapshot, plan, admitted)


def _require(holds: bool, rule: str, *values: object) -> None:
    if not holds:
        raise PlanError(rule.format(*values))


def _chosen(ids: Sequence[int], entries: Iterable[_Entry], what: str) -> list[_Entry]:
    """The entries that `ids` name; looks no further than the last of them, because the first are chosen most."""
    if not ids:
        return []
    missing = set(ids)
    if len(missing) != len(ids):
        raise PlanError(f"{what}: a request is named twice")
    chosen: list[_Entry] = []
    for entry in entries:
        if not missing:
            break
        if entry.request_id in missing:
            missing.remove(entry.request_id)
            chosen.append(entry)
    _require(not missing, "{}: request {} cannot be chosen", what, *missing)
    return chosen


def _check_choices(snapshot: Snapshot, plan: Plan) -> list[WaitingEntry]:
    """The entries of the requests to admit."""
    admitted = _chosen(plan.admit, chain(snapshot.waiting, snapshot.late), "admit")
    if plan.refuse:
        refused = [refusal.request_id for refusal in plan.refuse]
        _chosen(refused, chain(snapshot.waiting, snapshot.late), "refuse")
        _require(set(refused).isdisjoint(plan.admit), "a request is both admitted and refused")
    _chosen(plan.preempt, snapshot.victims, "preempt")
    _require(len(admitted) <= snapshot.free_seats, "more requests admitted than seats are free")
    return admitted


def _check_lane(snapshot: Snapshot, start: Start) -> None:
    lattice = snapshot.limits.lattice
    for lane in lanes_of(start):
        state = snapshot.prefill_lane if lane is Lane.PREFILL else snapshot.decode_lane
        if len(state.steps) >= LANE_DEPTH:
            raise PlanError(f"the {lane} lane is {LANE_DEPTH} steps deep already")
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
    _require(bool(requests), "a prefill batch without requests")
    _require(len(requests) == len(ranges), "every request of a batch needs one token range")
    _require(len(requests) <= MAX_BATCH_PROMPTS, "a step holds at most {} prompts", MAX_BATCH_PROMPTS)
    tokens = sum([end - start for start, end in ranges])
    _require(tokens <= MAX_BATCH_TOKENS, "a step holds at most {} prompt tokens", MAX_BATCH_TOKENS)
    there = [entry for entry in snapshot.admitted if entry.request_id not in preempted]
    admitted = {entry.request_id: entry for entry in _chosen(requests, there, "prefill")}
    for request_id, (start, end) in zip(requests, ranges, strict=True):
        entry = admitted[request_id]
        if start != entry.computed_tokens:
            raise PlanError(f"request {request_id} goes on at {entry.computed_tokens}")
        if not start < end <= entry.prompt_tokens:
            raise PlanError(f"request {request_id} has no tokens {start} to {end}")
        if end - start > MAX_RANGE_TOKENS:
            raise PlanError(f"a token range holds at most {MAX_RANGE_TOKENS} tokens")


def _check_rows(snapshot: Snapshot, start: DecodeStep | MixedStep, plan: Plan) -> None:
    gone = sum(v.decoding for v in snapshot.victims if v.request_id in plan.preempt) if plan.preempt else 0
    if isinstance(start, DecodeStep):
        _require(snapshot.decode_rows > gone, "a decode step without rows")
    else:
        _require(bool(start.requests) or snapshot.decode_rows > gone, "a mixed step without any work")


def _check_blocks(snapshot: Snapshot, plan: Plan, admitted: list[WaitingEntry]) -> None:
    """Blocks of a victim come back later: they help no start of the same plan, but its own need falls away."""
    wanted = sum([entry.prompt_blocks for entry in admitted])
    if any(not isinstance(start, PrefillGroup) for start in plan.starts):
        spared = sum([v.needs_block for v in snapshot.victims if v.request_id in plan.preempt])
        wanted += snapshot.decode_blocks_needed - spared
    _require(wanted <= snapshot.free_blocks, "{} blocks wanted, {} free", wanted, snapshot.free_blocks)
