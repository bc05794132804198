"""Each rule of a plan, broken once; every other thing about the plan is in order."""

import pytest

from bulletserve.core.errors import PlanError
from bulletserve.core.operators import StepShape
from bulletserve.core.plan import DecodeStep, MixedStep, Plan, PrefillGroup, Refusal, Start
from bulletserve.core.snapshot import (
    LANE_DEPTH,
    AdmittedEntry,
    LaneState,
    Limits,
    PrefillProgress,
    Snapshot,
    StepUnderWay,
    Victim,
    WaitingEntry,
)
from bulletserve.scheduler.plan_check import plan_check
from tests.scheduler.world import LATTICE, TOTAL_SMS

WAITING, WAITING_TOO, ADMITTED, ADMITTED_LONG, ROW, ROW_TOO = range(6)
IDLE = LaneState()
FULL = LaneState((StepUnderWay(StepShape.decode(1, 1, 8), 8, 0.0),) * LANE_DEPTH, 8)
SNAPSHOT = Snapshot(
    now_s=0.0,
    limits=Limits(
        num_layers=8,
        block_size=4,
        total_blocks=100,
        max_seqs=8,
        group_token_layers=64,
        batch_tokens=64,
        lattice=LATTICE,
    ),
    waiting=(
        WaitingEntry(WAITING, 0.0, 8, 2, 1.0, "a"),
        WaitingEntry(WAITING_TOO, 0.0, 8, 2, 1.0, "a"),
    ),
    waiting_total=2,
    waiting_tokens=16,
    late=(),
    late_total=0,
    admitted=(
        AdmittedEntry(ADMITTED, 0.0, 10, 4, 1.0, "a"),
        AdmittedEntry(ADMITTED_LONG, 0.0, 9000, 0, 1.0, "a"),
    ),
    prefill=None,
    prefilling_rows=0,
    decode_rows=2,
    decode_tokens=20,
    decode_classes=(),
    decode_blocks_needed=1,
    victims=(),
    free_blocks=5,
    returning_blocks=0,
    free_seats=2,
    prefill_lane=IDLE,
    decode_lane=IDLE,
)
SHORT = SNAPSHOT._replace(
    free_blocks=0,
    victims=(Victim(ADMITTED, 2, False, False), Victim(ROW, 2, True, True), Victim(ROW_TOO, 3, False, True)),
)
UNDER_WAY = SNAPSHOT._replace(prefill=PrefillProgress((7, 8), ((0, 4), (2, 6)), 3))
FULL_LANES = SNAPSHOT._replace(prefill_lane=FULL, decode_lane=FULL)
PREFILL_FULL = SNAPSHOT._replace(prefill_lane=FULL)

CROWD = tuple(range(100, 229))
CROWDED = SNAPSHOT._replace(admitted=tuple(AdmittedEntry(i, 0.0, 4096, 0, 1.0, "a") for i in CROWD))

DECODE = DecodeStep(4)
GROUP = PrefillGroup((ADMITTED,), ((4, 10),), (0, 8), 4)
MIXED = MixedStep((ADMITTED,), ((4, 10),), TOTAL_SMS)
ROWS_ONLY = MixedStep((), (), TOTAL_SMS)
NEXT = PrefillGroup((7, 8), ((0, 4), (2, 6)), (3, 5), 4)


def starts(*steps: Start) -> Plan:
    return Plan(starts=steps)


@pytest.mark.parametrize(
    ("snapshot", "plan"),
    [
        (SNAPSHOT, Plan()),
        (SNAPSHOT, Plan(admit=(WAITING, WAITING_TOO))),
        (SNAPSHOT, Plan(starts=(DECODE,), admit=(WAITING, WAITING_TOO))),
        (SNAPSHOT, Plan(admit=(WAITING,), refuse=(Refusal(WAITING_TOO, "no"),))),
        (SNAPSHOT, starts(GROUP, DECODE)),
        (SNAPSHOT, starts(MIXED)),
        (SNAPSHOT, starts(ROWS_ONLY)),
        (SNAPSHOT, starts(PrefillGroup((ADMITTED_LONG,), ((0, 4096),), (0, 1), 8))),
        (UNDER_WAY, starts(NEXT, DECODE)),
        (SHORT, Plan(preempt=(ROW, ROW_TOO, ADMITTED))),
        (SHORT, Plan(starts=(DECODE,), preempt=(ROW,))),
        (SHORT, Plan(starts=(GROUP,), preempt=(ROW, ROW_TOO))),
        (SHORT, Plan(starts=(MIXED,), preempt=(ROW, ROW_TOO))),
        (PREFILL_FULL, starts(DECODE)),
    ],
)
def test_these_are_in_order(snapshot: Snapshot, plan: Plan) -> None:
    plan_check(snapshot, plan)


@pytest.mark.parametrize(
    ("snapshot", "plan", "rule"),
    [
        (SNAPSHOT, Plan(admit=(WAITING, WAITING)), "admit: a request is named twice"),
        (SNAPSHOT, Plan(admit=(ADMITTED,)), f"admit: request {ADMITTED} cannot be chosen"),
        (SNAPSHOT, Plan(refuse=(Refusal(ROW, "no"),)), f"refuse: request {ROW} cannot be chosen"),
        (SNAPSHOT, Plan(refuse=(Refusal(0, "no"), Refusal(0, "no"))), "refuse: a request is named twice"),
        (SNAPSHOT, Plan(admit=(WAITING,), refuse=(Refusal(WAITING, "no"),)), "both admitted and refused"),
        (SNAPSHOT, Plan(preempt=(ROW,)), f"preempt: request {ROW} cannot be chosen"),
        (SHORT, Plan(preempt=(ROW, ROW)), "preempt: a request is named twice"),
        (SNAPSHOT._replace(free_seats=0), Plan(admit=(WAITING,)), "more requests admitted than seats are free"),
        (SNAPSHOT._replace(free_blocks=3), Plan(admit=(WAITING, WAITING_TOO)), "4 blocks wanted, 3 free"),
        (SNAPSHOT, starts(DECODE, DECODE), "two starts on the decode lane"),
        (SNAPSHOT, starts(GROUP, MIXED), "two starts on the prefill lane"),
        (SNAPSHOT, starts(DECODE, ROWS_ONLY), "two starts on the decode lane"),
        (FULL_LANES, starts(DECODE), "the decode lane is 2 steps deep already"),
        (PREFILL_FULL, starts(GROUP), "the prefill lane is 2 steps deep already"),
        (PREFILL_FULL, starts(ROWS_ONLY), "the prefill lane is 2 steps deep already"),
        (SNAPSHOT, starts(MIXED._replace(sms=4)), "a mixed step takes the whole device"),
        (SNAPSHOT, starts(GROUP._replace(sms=5)), "no partition gives prefill 5 SMs"),
        (SNAPSHOT, starts(DECODE._replace(sms=3)), "no partition gives decode 3 SMs"),
        (SNAPSHOT, starts(GROUP._replace(layer_range=(0, 9))), "no such layers: 0 to 9"),
        (SNAPSHOT, starts(GROUP._replace(layer_range=(0, 0))), "no such layers: 0 to 0"),
        (SNAPSHOT, starts(GROUP._replace(layer_range=(1, 8))), "a new batch starts at its first layer"),
        (UNDER_WAY, starts(GROUP._replace(layer_range=(3, 8))), "another batch is between its first and last layer"),
        (UNDER_WAY, starts(NEXT._replace(token_ranges=((0, 4), (2, 5)))), "a batch keeps its token ranges"),
        (UNDER_WAY, starts(NEXT._replace(layer_range=(4, 5))), "the batch goes on at layer 3, not 4"),
        (UNDER_WAY, starts(MIXED), "no mixed step while a batch is between its first and last layer"),
        (SNAPSHOT, starts(ROWS_ONLY._replace(token_ranges=((0, 1),))), "a token range without a request"),
        (SNAPSHOT._replace(decode_rows=0), starts(ROWS_ONLY), "a mixed step without any work"),
        (SHORT, Plan(starts=(ROWS_ONLY,), preempt=(ROW, ROW_TOO)), "a mixed step without any work"),
        (SNAPSHOT, starts(GROUP._replace(requests=(), token_ranges=())), "a prefill batch without requests"),
        (SNAPSHOT, starts(GROUP._replace(token_ranges=())), "every request of a batch needs one token range"),
        (SNAPSHOT, starts(GROUP._replace(requests=(ROW,))), f"prefill: request {ROW} cannot be chosen"),
        (
            SNAPSHOT,
            starts(GROUP._replace(requests=(ADMITTED,) * 2, token_ranges=((4, 10),) * 2)),
            "prefill: a request is named twice",
        ),
        (SHORT, Plan(starts=(GROUP,), preempt=(ADMITTED,)), f"prefill: request {ADMITTED} cannot be chosen"),
        (SNAPSHOT, starts(GROUP._replace(token_ranges=((0, 10),))), f"request {ADMITTED} goes on at 4"),
        (SNAPSHOT, starts(GROUP._replace(token_ranges=((4, 11),))), f"request {ADMITTED} has no tokens 4 to 11"),
        (SNAPSHOT, starts(MIXED._replace(token_ranges=((4, 4),))), f"request {ADMITTED} has no tokens 4 to 4"),
        (
            SNAPSHOT,
            starts(PrefillGroup((ADMITTED_LONG,), ((0, 4097),), (0, 1), 8)),
            "a token range holds at most 4096 tokens",
        ),
        (
            CROWDED,
            starts(PrefillGroup(CROWD, ((0, 1),) * len(CROWD), (0, 1), 8)),
            "a step holds at most 128 prompts",
        ),
        (
            CROWDED,
            starts(MixedStep(CROWD[:3], ((0, 4096), (0, 4096), (0, 1)), TOTAL_SMS)),
            "a step holds at most 8192 prompt tokens",
        ),
        (SNAPSHOT._replace(decode_rows=0), starts(DECODE), "a decode step without rows"),
        (SHORT, Plan(starts=(DECODE,), preempt=(ROW, ROW_TOO)), "a decode step without rows"),
        (SHORT, starts(DECODE), "1 blocks wanted, 0 free"),
        (SHORT, Plan(starts=(DECODE,), preempt=(ROW_TOO,)), "1 blocks wanted, 0 free"),
        (
            SNAPSHOT._replace(free_blocks=4),
            Plan(starts=(DECODE,), admit=(WAITING, WAITING_TOO)),
            "5 blocks wanted, 4 free",
        ),
    ],
)
def test_a_broken_rule_is_named(snapshot: Snapshot, plan: Plan, rule: str) -> None:
    with pytest.raises(PlanError, match=rule):
        plan_check(snapshot, plan)
