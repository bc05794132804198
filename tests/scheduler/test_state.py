"""What the state does, step by step, on examples small enough to follow by hand."""

from collections.abc import Sequence
from typing import NoReturn
from unittest.mock import patch

import pytest

from bulletserve.core.correction import Correction
from bulletserve.core.events import Aborted, Arrived, Output, StepDone
from bulletserve.core.launch import Launch
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import DecodeStep, MixedStep, Plan, PrefillGroup, Start
from bulletserve.core.prefix import block_hashes
from bulletserve.core.request import Finished, FinishReason, Request
from bulletserve.core.slo import Slo
from bulletserve.core.snapshot import Limits, Snapshot
from bulletserve.scheduler import state
from bulletserve.scheduler.engine_view import snapshot_of, status_of
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.plan_check import plan_check
from bulletserve.scheduler.policies.bullet import Bullet
from bulletserve.scheduler.policy import Forecaster
from bulletserve.scheduler.queue_rules import FIRST_COME, QueueRules
from bulletserve.scheduler.state import State
from tests.scheduler.forecasters import Arithmetic
from tests.scheduler.world import LATTICE, TOTAL_SMS

DECODE = DecodeStep(TOTAL_SMS)
STOP = 9


class Hands:
    """A state whose every step is started and ended by hand."""

    def __init__(
        self,
        blocks: int = 20,
        *,
        block_size: int = 4,
        caching: bool = True,
        rules: QueueRules = FIRST_COME,
        estimator: Forecaster | None = None,
        lattice: Lattice = LATTICE,
    ) -> None:
        limits = Limits(
            num_layers=4,
            block_size=block_size,
            total_blocks=blocks,
            max_seqs=4,
            group_token_layers=16,
            batch_tokens=16,
            lattice=lattice,
        )
        self.ledger = KvLedger(blocks + 1, block_size, caching)
        self.state = State(limits, self.ledger, rules, estimator)
        self.now_s = 0.0
        self.launches: list[Launch] = []

    @property
    def snapshot(self) -> Snapshot:
        return snapshot_of(self.state, self.now_s)

    def arrive(self, request_id: int, prompt: Sequence[int], max_tokens: int = 10, tpot_s: float | None = None) -> None:
        slo = Slo("chat", None, tpot_s)
        stops = frozenset({STOP})
        self.state.apply(Arrived(Request(request_id, prompt, max_tokens, self.now_s, stop_ids=stops, slo=slo)), 0.0)

    def do(self, plan: Plan) -> None:
        plan_check(self.snapshot, plan)
        self.state.carry_out(plan, self.now_s, self.launches.append)

    def start(self, *starts: Start) -> Launch:
        self.do(Plan(starts=starts))
        return self.launches[-1]

    def admit(self, *request_ids: int) -> None:
        self.do(Plan(admit=request_ids))

    def prefill(self, *request_ids: int, layers: tuple[int, int] = (0, 4)) -> Launch:
        ranges = {e.request_id: (e.computed_tokens, e.prompt_tokens) for e in self.snapshot.admitted}
        if self.snapshot.prefill is not None:
            ranges = dict(zip(request_ids, self.snapshot.prefill.token_ranges, strict=True))
        return self.start(PrefillGroup(request_ids, tuple(ranges[i] for i in request_ids), layers, TOTAL_SMS))

    def end(self, launch: Launch, *tokens: int, error: str = "") -> Output | None:
        self.now_s += 1.0
        self.state.apply(StepDone(launch.step_id, tokens, self.now_s - 1.0, self.now_s, error), self.now_s)
        self.ledger.check_integrity()
        return self.state.take_output(self.now_s)

    def decoding(self, request_id: int, prompt: Sequence[int], max_tokens: int = 10) -> None:
        """Bring a request to where it has its first token, 7."""
        self.arrive(request_id, prompt, max_tokens)
        self.admit(request_id)
        self.end(self.prefill(request_id), 7)


def test_a_life_from_arrival_to_the_last_token() -> None:
    hands = Hands()
    hands.arrive(1, (1, 2, 3), max_tokens=3)
    assert [entry.request_id for entry in hands.snapshot.waiting] == [1]
    hands.admit(1)
    assert (hands.snapshot.waiting_total, hands.snapshot.free_seats, hands.snapshot.free_blocks) == (0, 3, 19)
    launch = hands.prefill(1)
    assert launch.seats[0].token_ids == (1, 2, 3)
    assert [(part.start, part.end, part.samples) for part in launch.parts] == [(0, 3, True)]
    assert (hands.snapshot.prefilling_rows, hands.snapshot.decode_rows) == (1, 0)
    output = hands.end(launch, 5)
    assert output is not None
    assert (output.request_ids, output.tokens, output.first_tokens) == ((1,), (5,), ((1, 0),))
    first = hands.start(DECODE)
    assert first.blocks == ()
    assert hands.snapshot.decode_rows == 1
    second = hands.start(DECODE)
    assert [block for _, block in second.blocks] == [2]
    assert hands.snapshot.decode_rows == 0, "the end by max_tokens is known ahead"
    hands.end(first, 6)
    output = hands.end(second, 7)
    assert output is not None
    assert output.finished == (Finished(1, FinishReason.LENGTH),)
    assert hands.state.is_idle
    assert hands.snapshot.free_blocks == 20


def test_the_token_after_a_stop_is_void_and_its_blocks_stay_until_it_is_drawn() -> None:
    hands = Hands()
    hands.decoding(1, (1, 2, 3))
    first, second = hands.start(DECODE), hands.start(DECODE)
    output = hands.end(first, STOP)
    assert output is not None
    assert output.finished == (Finished(1, FinishReason.STOP, STOP),)
    assert hands.ledger.used_blocks == 2
    assert not hands.state.is_idle
    assert hands.end(second, 8) is None
    assert hands.ledger.used_blocks == 0
    assert hands.state.is_idle


def test_an_abort_between_the_layers_of_a_batch_waits_for_the_batch() -> None:
    hands = Hands()
    for request_id in (1, 2):
        hands.arrive(request_id, (request_id,) * 8)
    hands.admit(1, 2)
    hands.end(hands.prefill(1, 2, layers=(0, 2)))
    hands.state.apply(Aborted(1), 0.0)
    assert hands.ledger.used_blocks == 4
    last = hands.prefill(1, 2, layers=(2, 4))
    output = hands.end(last, 7, 8)
    assert output is not None
    assert (output.request_ids, output.tokens) == ((2,), (8,))
    assert hands.ledger.used_blocks == 2


def test_a_batch_that_nobody_waits_for_is_given_up() -> None:
    hands = Hands()
    hands.arrive(1, (1,) * 8)
    hands.admit(1)
    group = hands.prefill(1, layers=(0, 2))
    hands.state.apply(Aborted(1), 0.0)
    assert hands.snapshot.prefill is None
    assert hands.ledger.used_blocks == 2
    hands.end(group)
    assert hands.state.is_idle
    assert hands.ledger.used_blocks == 0


def test_a_group_that_fails_ends_its_batch_even_when_its_last_layers_are_started_and_another_has_begun() -> None:
    hands = Hands()
    for request_id in (1, 2):
        hands.arrive(request_id, (request_id,) * 8)
    hands.admit(1, 2)
    first, last = hands.prefill(1, layers=(0, 2)), hands.prefill(1, layers=(2, 4))
    output = hands.end(first, error="boom")
    assert output is not None
    assert output.finished == (Finished(1, FinishReason.ERROR, message="boom"),)
    other = hands.prefill(2, layers=(0, 2))
    assert hands.end(last, 7) is None
    assert hands.end(other) is None
    assert hands.snapshot.prefill is not None
    hands.end(hands.prefill(2, layers=(2, 4)), 8)
    assert hands.snapshot.decode_rows == 1


def test_a_failed_step_names_no_block() -> None:
    hands = Hands()
    hands.arrive(1, tuple(range(8)))
    hands.admit(1)
    hands.end(hands.prefill(1), error="boom")
    hands.arrive(2, tuple(range(8)))
    hands.admit(2)
    assert hands.snapshot.admitted[0].computed_tokens == 0


def test_blocks_have_names_when_their_step_has_run_and_not_before() -> None:
    hands = Hands()
    for request_id in (1, 2, 3):
        hands.arrive(request_id, tuple(range(10)))
    hands.admit(1)
    launch = hands.prefill(1)
    hands.admit(2)
    hands.end(launch, 7)
    hands.admit(3)
    assert [entry.computed_tokens for entry in hands.snapshot.admitted] == [0, 8]


@pytest.mark.parametrize("end", ["length", "stop"])
def test_an_answer_is_cached_with_its_prompt(end: str) -> None:
    """The next turn of a conversation finds all but the last token of what was said."""
    hands = Hands()
    hands.decoding(1, (1, 2, 3), max_tokens=10)
    answer = [7, *range(10, 18), STOP if end == "stop" else 18]
    for token in answer[1:]:
        hands.end(hands.start(DECODE), token)
    assert hands.state.is_idle
    hands.arrive(2, (1, 2, 3, *answer, 20))
    hands.admit(2)
    assert hands.snapshot.admitted[0].computed_tokens == 12


def test_a_preempted_request_resumes_where_it_was_and_finds_its_own_blocks() -> None:
    hands = Hands(blocks=5)
    hands.decoding(1, (1,) * 7)
    hands.decoding(2, (2,) * 7)
    hands.end(hands.start(DECODE), 11, 12)
    assert (hands.snapshot.free_blocks, hands.snapshot.decode_blocks_needed) == (1, 2)
    assert [victim.request_id for victim in hands.snapshot.victims] == [2], "the first of all is no victim"
    hands.do(Plan(preempt=(2,)))
    assert hands.snapshot.victims == ()
    (entry,) = hands.snapshot.waiting
    assert (entry.prompt_tokens, entry.preempted) == (9, True)
    hands.end(hands.start(DECODE), STOP)
    hands.admit(2)
    launch = hands.prefill(2)
    assert list(launch.seats[0].token_ids) == [2] * 7 + [7, 12]
    assert launch.seats[0].cached_tokens == 8
    output = hands.end(launch, 13)
    assert output is not None
    assert (output.tokens, output.first_tokens) == ((13,), ())


def test_a_preempted_request_names_no_block_that_is_not_computed() -> None:
    """Eight tokens are known, but the cache holds seven: the second block is not full."""
    hands = Hands(blocks=4)
    hands.decoding(1, (1,) * 8, max_tokens=5)
    hands.decoding(2, (2,) * 7)
    hands.do(Plan(preempt=(2,)))
    hands.arrive(3, (2,) * 7 + (7, 5), max_tokens=5)
    hands.end(hands.start(DECODE), STOP)
    hands.admit(3)
    assert hands.snapshot.admitted[0].computed_tokens == 4


def test_a_request_preempted_in_the_step_that_computes_its_prompt_names_nothing_before_its_end() -> None:
    hands = Hands(blocks=4)
    hands.decoding(1, (1,) * 7)
    hands.arrive(2, (2,) * 5)
    hands.admit(2)
    mixed = hands.start(MixedStep((2,), ((0, 5),), TOTAL_SMS))
    assert [victim.request_id for victim in hands.snapshot.victims] == [2]
    hands.do(Plan(preempt=(2,)))
    (name,) = block_hashes((2,) * 5, 4)
    assert not hands.ledger.look_up([name])
    hands.end(mixed, 20, 10)
    assert hands.ledger.look_up([name])


def test_the_tokens_under_way_of_a_preempted_request_are_told() -> None:
    hands = Hands(blocks=4)
    hands.decoding(1, (1,) * 7)
    hands.decoding(2, (2,) * 7)
    step = hands.start(DECODE)
    hands.do(Plan(preempt=(2,)))
    assert hands.snapshot.decode_blocks_needed == 1
    assert hands.snapshot.returning_blocks == 2
    output = hands.end(step, 11, 12)
    assert output is not None
    assert dict(zip(output.request_ids, output.tokens, strict=True)) == {1: 11, 2: 12}
    assert [entry.prompt_tokens for entry in hands.snapshot.waiting] == [9]


def test_who_finishes_a_prompt_in_a_mixed_step_decodes_in_the_next() -> None:
    hands = Hands()
    hands.decoding(1, (1,) * 5)
    hands.arrive(2, (2,) * 5)
    hands.admit(2)
    mixed = hands.start(MixedStep((2,), ((0, 5),), TOTAL_SMS))
    assert (len(mixed.rows), len(mixed.parts)) == (1, 1)
    lanes = hands.snapshot.prefill_lane, hands.snapshot.decode_lane
    assert [(lane.queued, lane.sms) for lane in lanes] == [(1, TOTAL_SMS)] * 2
    after = hands.start(DECODE)
    assert len(after.rows) == 2
    output = hands.end(mixed, 20, 10)
    assert output is not None
    assert (output.request_ids, output.tokens) == ((2, 1), (20, 10))
    output = hands.end(after, 11, 21)
    assert output is not None
    assert (output.request_ids, output.tokens) == ((1, 2), (11, 21))


def newcomer_under_way(blocks: int = 20, prompt: int = 5) -> tuple[Hands, Launch]:
    """One request decodes, the last group of another's prompt runs."""
    hands = Hands(blocks)
    hands.decoding(1, (1,) * 5)
    hands.arrive(2, (2,) * prompt, max_tokens=5, tpot_s=3.0)
    hands.admit(2)
    return hands, hands.prefill(2)


@pytest.mark.parametrize("with_prompt", [False, True])
def test_who_finishes_a_prompt_in_a_group_is_a_row_of_a_step_on_all_sms_behind_it(with_prompt: bool) -> None:
    hands, group = newcomer_under_way()
    if with_prompt:
        hands.arrive(3, (3,) * 6)
        hands.admit(3)
    after = hands.start(MixedStep((3,), ((0, 5),), TOTAL_SMS) if with_prompt else DECODE)
    assert len(after.rows) == 2
    assert (hands.snapshot.prefilling_rows, hands.snapshot.decode_rows) == (0, 2)
    output = hands.end(group, 20)
    assert output is not None
    assert (output.request_ids, output.tokens, output.first_tokens) == ((2,), (20,), ((2, 0),))
    told_s = hands.now_s
    slack_s = next(load.least_slack_s for load in hands.snapshot.decode_classes if load.tpot_s == 3.0)
    assert slack_s == pytest.approx(6.0), "its second token, which is under way, counts as told"
    output = hands.end(after, 10, 21)
    assert output is not None
    assert (output.request_ids, output.tokens) == ((1, 2), (10, 21))
    assert hands.now_s == told_s + 1.0


def test_a_step_on_a_share_does_not_wait_for_newcomers() -> None:
    hands, group = newcomer_under_way()
    beside = hands.start(DecodeStep(2))
    assert len(beside.rows) == 1
    hands.end(beside, 10)
    hands.end(group, 20)
    assert hands.snapshot.decode_rows == 2


def test_where_both_lanes_have_all_sms_decode_neither_waits_for_newcomers_nor_is_queued_for_them() -> None:
    hands = Hands(lattice=Lattice.of_splits(TOTAL_SMS, (Partition(TOTAL_SMS, TOTAL_SMS),)))
    hands.decoding(1, (1,) * 5)
    hands.arrive(2, (2,) * 5, max_tokens=5)
    hands.admit(2)
    hands.prefill(2)
    assert len(hands.start(DECODE).rows) == 1
    assert not Bullet().decide(hands.snapshot, Arithmetic()).starts


def test_a_newcomer_that_stops_at_its_first_token_has_none_in_the_step_behind() -> None:
    hands, group = newcomer_under_way()
    after = hands.start(DECODE)
    output = hands.end(group, STOP)
    assert output is not None
    assert output.finished == (Finished(2, FinishReason.STOP, STOP),)
    assert hands.ledger.used_blocks == 4, "the step behind may still write there"
    output = hands.end(after, 10, 21)
    assert output is not None
    assert (output.request_ids, output.tokens) == ((1,), (10,))
    assert hands.ledger.used_blocks == 2


def test_a_newcomer_whose_group_fails_takes_nobody_of_the_step_behind_with_it() -> None:
    hands, group = newcomer_under_way()
    after = hands.start(DECODE)
    output = hands.end(group, error="no")
    assert output is not None
    assert output.finished == (Finished(2, FinishReason.ERROR, None, "no"),)
    output = hands.end(after, 10, 21)
    assert output is not None
    assert (output.request_ids, output.tokens) == ((1,), (10,))


def test_a_newcomer_names_no_block_before_its_group_has_ended() -> None:
    """Steps that end meanwhile may have rows name what they have filled; of a group that fails nothing is filled."""
    hands = Hands()
    hands.decoding(1, (1,) * 5)
    beside = hands.start(DecodeStep(2))
    hands.arrive(2, range(20, 29))
    hands.admit(2)
    group = hands.prefill(2)
    after = hands.start(DECODE)
    with patch.object(state, "NAMING_STEPS", 1):
        hands.end(beside, 10)
    hands.end(group, error="no")
    hands.end(after, 11, 12)
    hands.arrive(3, range(20, 29))
    hands.admit(3)
    assert hands.snapshot.admitted[0].computed_tokens == 0


def test_a_newcomer_preempted_before_its_first_token_is_told_hears_what_is_under_way_and_comes_back() -> None:
    hands = Hands(blocks=4)
    hands.decoding(1, (1,) * 7)
    hands.arrive(2, (2,) * 7)
    hands.admit(2)
    group = hands.prefill(2)
    after = hands.start(DECODE)
    assert len(after.rows) == 2
    hands.do(Plan(preempt=(2,)))
    output = hands.end(group, 20)
    assert output is not None
    assert (output.tokens, output.first_tokens) == ((20,), ((2, 0),))
    output = hands.end(after, 10, 21)
    assert output is not None
    assert (output.request_ids, output.tokens) == ((1, 2), (10, 21))
    assert [(entry.prompt_tokens, entry.preempted) for entry in hands.snapshot.waiting] == [(9, True)]


@pytest.mark.parametrize(("blocks", "rows"), [(5, 2), (4, 1)])
def test_a_newcomer_that_begins_a_block_joins_ahead_if_one_is_left(blocks: int, rows: int) -> None:
    hands, group = newcomer_under_way(blocks, prompt=8)
    assert hands.snapshot.free_blocks == blocks - 4
    after = hands.start(DECODE)
    assert len(after.rows) == rows
    hands.end(group, 20)
    assert hands.snapshot.decode_rows == 2


def test_slack_is_what_the_next_token_may_be_late() -> None:
    hands = Hands()
    hands.arrive(1, (1, 2), tpot_s=3.0)
    hands.admit(1)
    hands.end(hands.prefill(1), 7)
    (load,) = hands.snapshot.decode_classes
    assert (load.slo_class, load.rows, load.context_tokens) == ("chat", 1, 2)
    assert load.least_slack_s == pytest.approx(3.0)
    step = hands.start(DECODE)
    assert hands.snapshot.decode_classes[0].least_slack_s == pytest.approx(6.0)
    hands.end(step, 8)
    assert hands.snapshot.decode_classes[0].least_slack_s == pytest.approx(5.0)


@pytest.mark.parametrize(("prompt", "max_tokens"), [((1,) * 70, 12), ((1,) * 81, 1), ((), 1)])
def test_what_could_never_end_is_refused_at_once(prompt: tuple[int, ...], max_tokens: int) -> None:
    hands = Hands()
    hands.arrive(1, prompt, max_tokens)
    output = hands.state.take_output(0.0)
    assert output is not None
    assert output.finished[0].reason is FinishReason.REFUSED
    assert hands.state.is_idle


def test_what_just_fits_is_not() -> None:
    hands = Hands()
    hands.arrive(1, (1,) * 70, 11)
    assert hands.state.take_output(0.0) is None


def test_the_gap_before_the_last_token_counts() -> None:
    hands = Hands()
    hands.decoding(1, (1, 2), max_tokens=3)
    first, second = hands.start(DECODE), hands.start(DECODE)
    hands.end(first, 7)
    hands.now_s += 30.0
    hands.end(second, 8)
    assert hands.state.lanes.longest_gap_s(hands.now_s) == pytest.approx(31.0)
    hands.now_s += 10.0
    hands.decoding(2, (1, 2), max_tokens=2)
    hands.end(hands.start(DECODE), 7)
    assert hands.state.lanes.longest_gap_s(hands.now_s) == pytest.approx(31.0), "an idle engine has no gap"


def test_aborting_whom_nobody_knows_changes_nothing() -> None:
    hands = Hands()
    hands.state.apply(Aborted(77), 0.0)
    assert hands.state.take_output(0.0) is None


def test_after_an_idle_while_decode_is_free_since_its_first_row_joined() -> None:
    hands = Hands()
    hands.decoding(1, (1, 2), max_tokens=2)
    hands.end(hands.start(DECODE), 7)
    before_s = hands.snapshot.decode_lane.free_s
    hands.now_s += 100.0
    hands.arrive(2, (1, 2))
    hands.admit(2)
    hands.end(hands.prefill(2), 7)
    assert hands.snapshot.decode_lane.free_s == hands.now_s > before_s + 99.0
    joined_s = hands.now_s
    hands.now_s += 1.0
    hands.decoding(3, (1, 2))
    assert hands.snapshot.decode_lane.free_s == joined_s, "only the first"


def test_a_snapshot_shows_the_steps_under_way_and_since_when() -> None:
    hands = Hands()
    hands.decoding(0, range(5))
    hands.arrive(1, range(100, 106))
    hands.admit(1)
    hands.now_s = 20.0
    decode = hands.start(DecodeStep(2))
    group = hands.start(PrefillGroup((1,), ((0, 6),), (0, 3), 6))
    whole = hands.start(DECODE)
    snapshot = hands.snapshot
    (first, second), (other,) = snapshot.decode_lane.steps, snapshot.prefill_lane.steps
    assert first == (StepShape.decode(1, 6, 4), 2, 20.0)
    assert second == (StepShape.decode(1, 7, 4), TOTAL_SMS, 20.0)
    assert other == (StepShape.prefill([(6, 0)], 3, 0), 6, 20.0)
    assert (snapshot.decode_lane.sms, snapshot.decode_lane.queued, snapshot.decode_lane.mixed) == (8, 2, False)
    hands.now_s = 21.0
    hands.end(decode, 7)  # at 22
    assert hands.snapshot.decode_lane.steps == (second._replace(since_s=22.0),)
    assert hands.snapshot.decode_lane.free_s == 22.0
    hands.end(group)  # at 23: the decode step on the whole device was not ordered behind it ...
    assert hands.snapshot.decode_lane.steps[0].since_s == 23.0  # ... but it was started before, so it was
    hands.end(whole, 7)
    assert hands.snapshot.decode_lane.steps == ()


def test_a_mixed_step_is_on_both_lanes_with_all_its_work() -> None:
    hands = Hands()
    hands.decoding(0, range(5))
    hands.arrive(1, range(100, 106))
    hands.admit(1)
    hands.start(MixedStep((1,), ((0, 6),), TOTAL_SMS))
    snapshot = hands.snapshot
    assert snapshot.prefill_lane.steps == snapshot.decode_lane.steps
    assert snapshot.decode_lane.steps[0].shape == StepShape.mixed([(6, 0)], 1, 6, 4, 2)
    assert snapshot.decode_lane.mixed


def test_a_request_whose_forecast_failed_ends_like_any_other() -> None:
    class Broken(Arithmetic):
        def predict(self, *_: object) -> NoReturn:
            raise ArithmeticError("no idea")

    hands = Hands(estimator=Broken())
    hands.arrive(0, range(5))
    with pytest.raises(ArithmeticError, match="no idea"):
        hands.state.apply(Arrived(Request(1, range(10), 5, 0.0, slo=Slo("chat", 3.0, 0.5))), 0.0)
    hands.state.fail_all("the run is over")
    assert hands.state.is_idle and hands.snapshot.waiting == ()
    output = hands.state.take_output(0.0)
    assert output is not None and {one.request_id for one in output.finished} == {0, 1}


def test_who_cannot_be_in_time_any_more_is_late_by_the_forecast() -> None:
    """Ten tokens take a second alone; corrected, twice as long."""
    physics = Arithmetic(num_layers=4, token_s=0.1)
    hands = Hands(rules=QueueRules("slack", "timely"), estimator=physics)
    for request_id, prefill_ratio in ((0, 1.0), (1, 2.0)):
        hands.state.correction = Correction(prefill=prefill_ratio)
        request = Request(request_id, range(10), 5, 0.0, slo=Slo("chat", 3.0, 0.5))
        hands.state.apply(Arrived(request), 0.0)
    one, two = hands.snapshot.waiting
    assert (one.request_id, one.lost_s, two.request_id, two.lost_s) == (1, 1.0, 0, 2.0)
    assert (one.deadline_s, one.tpot_s, hands.snapshot.waiting_tokens) == (3.0, 0.5, 20)
    assert status_of(hands.state, 0.0, 0).queue_s == pytest.approx(2 * 20 * 0.1)
    hands.now_s = 1.5
    snapshot = hands.snapshot
    assert ([e.request_id for e in snapshot.waiting], [e.request_id for e in snapshot.late]) == ([0], [1])
    assert (snapshot.waiting_total, snapshot.late_total, snapshot.waiting_tokens) == (1, 1, 10)
    hands.admit(1)
    assert hands.snapshot.late == ()


def test_a_preempted_answer_is_due_when_its_next_token_is_and_never_late() -> None:
    hands = Hands(rules=QueueRules("slack", "timely"), estimator=Arithmetic(num_layers=4))
    request = Request(0, range(5), 10, 0.0, slo=Slo("chat", 1.0, 2.0))
    hands.state.apply(Arrived(request), 0.0)
    hands.admit(0)
    hands.end(hands.prefill(0), 7)  # told at 1
    hands.decoding(1, range(30, 35))
    hands.state._withdraw(hands.state.jobs[0])
    hands.now_s = 50.0
    (entry,) = hands.snapshot.waiting
    assert (entry.preempted, entry.deadline_s, hands.snapshot.late) == (True, 3.0, ())


def test_the_length_of_answers_is_learned_from_their_ends() -> None:
    hands = Hands()
    assert hands.snapshot.answer_tokens == 0
    hands.decoding(0, range(5), max_tokens=3)
    hands.end(hands.start(DECODE), 7)
    hands.end(hands.start(DECODE), 7)
    assert hands.snapshot.answer_tokens == 3
