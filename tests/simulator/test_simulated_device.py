"""The device made of arithmetic, with arithmetic that fits in a head."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.events import Aborted, Event, StepDone
from bulletserve.core.launch import Launch, PromptPart, Seat
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import DecodeStep, MixedStep, PrefillGroup
from bulletserve.simulator.device import SimulatedDevice, counting_token
from bulletserve.simulator.executor import VirtualExecutor
from bulletserve.simulator.truth import Uncapped

ALL, HALF = 8, 4
LAYERS = 4


@dataclass
class PlainTruth(Uncapped):
    """A second per 8 prompt tokens or per row on all SMs; twice that on half; beside another, `factor` times."""

    factor: float = 1.0
    total_sms: int = ALL

    def alone_s(self, step: StepShape, sms: int) -> float:
        return step.layers / LAYERS * (step.prefill_tokens / 8 + step.decode_rows) * ALL / sms

    def beside_s(self, step: StepShape, sms: int, other: StepShape, other_sms: int) -> float:
        return self.factor * self.alone_s(step, sms)


def device(factor: float = 1.0, host_s: float = 0.0) -> SimulatedDevice:
    """With a request of 8 tokens on each of four seats."""
    made = SimulatedDevice(PlainTruth(factor), LAYERS, host_s=host_s)
    seats = tuple(Seat(seat, 10 + seat, (1,) * 8, 0, (1, 2), 0.0, 1.0, 0, 0) for seat in range(4))
    parts = tuple(PromptPart(seat, 0, 8, False) for seat in range(4))
    made.start(Launch(1000, PrefillGroup((), (), (0, 1), ALL), seats, parts=parts))
    made.advance(100.0)
    made.now_s = 0.0
    made._hosts_free_s = dict.fromkeys(made._hosts_free_s, 0.0)
    return made


def decode(step_id: int, sms: int = HALF, rows: tuple[int, ...] = (0,)) -> Launch:
    return Launch(step_id, DecodeStep(sms), rows=rows)


def prefill(step_id: int, sms: int = HALF, tokens: int = 8, layers: tuple[int, int] = (0, LAYERS)) -> Launch:
    parts = (PromptPart(1, 0, tokens, True),)
    return Launch(step_id, PrefillGroup((11,), ((0, tokens),), layers, sms), parts=parts)


def ends(made: SimulatedDevice, until_s: float = 100.0) -> dict[int, tuple[float, float]]:
    return {done.step_id: (done.started_s, done.finished_s) for done in made.advance(until_s)}


def test_a_lane_runs_its_steps_in_order() -> None:
    made = device()
    made.start(decode(1))
    made.start(decode(2))
    assert ends(made) == {1: (0.0, 2.0), 2: (2.0, 4.0)}


def test_shares_run_side_by_side() -> None:
    made = device()
    made.start(decode(1))
    made.start(prefill(2))
    assert ends(made) == {1: (0.0, 2.0), 2: (0.0, 2.0)}


def test_neighbours_slow_each_other_while_both_run() -> None:
    """Half speed beside each other: decode, 2 s alone, takes 4 s; prefill, 6 s alone, has a third done by then, and
    4 s of it left alone."""
    made = device(factor=2.0)
    made.start(decode(1))
    made.start(prefill(2, tokens=24))
    assert ends(made) == {1: (0.0, 4.0), 2: (0.0, 8.0)}


def test_a_neighbour_that_comes_later_slows_only_what_is_left() -> None:
    made = device(factor=2.0)
    made.start(prefill(1, tokens=16))
    assert ends(made, 3.0) == {}
    made.start(decode(2))
    assert made.next_change_s() == 5.0
    assert ends(made) == {1: (0.0, 5.0), 2: (3.0, 6.0)}


def test_all_sms_wait_for_everything_started_before() -> None:
    made = device()
    made.start(decode(1))
    made.start(prefill(2, tokens=16))
    made.start(decode(3, ALL))
    assert ends(made) == {1: (0.0, 2.0), 2: (0.0, 4.0), 3: (4.0, 5.0)}


def test_a_share_waits_for_its_own_lane_alone() -> None:
    made = device()
    made.start(prefill(1, ALL, tokens=16))
    made.start(decode(2))
    assert ends(made) == {2: (0.0, 2.0), 1: (0.0, 2.0)}


def test_a_mixed_step_is_behind_and_before_both_lanes() -> None:
    made = device()
    made.start(decode(1))
    mixed = MixedStep((11,), ((0, 8),), ALL)
    made.start(Launch(2, mixed, parts=(PromptPart(1, 0, 8, True),), rows=(0,)))
    made.start(decode(3))
    made.start(prefill(4))
    assert ends(made) == {1: (0.0, 2.0), 2: (2.0, 4.0), 3: (4.0, 6.0), 4: (4.0, 6.0)}


def test_a_step_begins_when_its_host_has_launched_it_and_launching_ahead_hides_that() -> None:
    made = device(host_s=0.5)
    made.start(decode(1))
    made.start(decode(2))
    made.start(prefill(3))
    assert made.next_change_s() == 0.5
    assert ends(made) == {1: (0.5, 2.5), 3: (0.5, 2.5), 2: (2.5, 4.5)}
    made.start(decode(4))
    assert ends(made, 200.0) == {4: (100.5, 102.5)}


def test_a_lanes_host_launches_one_step_after_the_other() -> None:
    made = device(host_s=3.0)
    made.start(decode(1))
    made.start(decode(2))
    assert ends(made) == {1: (3.0, 5.0), 2: (6.0, 8.0)}


def test_a_group_takes_its_layers_share_and_only_the_last_one_draws() -> None:
    made = device()
    made.start(prefill(1, ALL, layers=(0, 1)))
    made.start(prefill(2, ALL, layers=(1, 4)))
    first, last = made.advance(10.0)
    assert (first.finished_s, first.tokens) == (0.25, ())
    assert (last.finished_s, last.tokens) == (1.0, (counting_token(11, 8),))


def test_tokens_follow_the_request_and_its_position() -> None:
    made = device()
    made.start(prefill(1, ALL))
    made.start(decode(2, ALL, rows=(1,)))
    made.start(decode(3, ALL, rows=(1,)))
    tokens = [done.tokens for done in made.advance(10.0)]
    assert tokens == [(counting_token(11, position),) for position in (8, 9, 10)]


def test_the_truth_is_asked_about_what_the_step_computes() -> None:
    asked: list[StepShape] = []

    class Curious(PlainTruth):
        def alone_s(self, step: StepShape, sms: int) -> float:
            asked.append(step)
            return 1.0

    made = device()
    made.truth = Curious()
    made.start(prefill(1, ALL, tokens=8, layers=(0, 3)))
    made.start(prefill(2, ALL, tokens=8, layers=(3, LAYERS)))
    made.start(decode(3, ALL, rows=(1,)))
    rest = MixedStep((12,), ((3, 8),), ALL)
    made.start(Launch(4, rest, parts=(PromptPart(2, 3, 8, True),), rows=(1,)))
    made.advance(100.0)
    assert asked == [
        StepShape(8, 36, 8, 0, 0, 3, 0),
        StepShape(8, 36, 8, 0, 0, 1, 1),
        StepShape.decode(1, 9, LAYERS),
        StepShape(5, 5 * 3 + 15, 8, 1, 10, LAYERS, 2),
    ]


def test_time_moves_only_forwards_and_by_itself_nothing_happens() -> None:
    made = device()
    assert made.next_change_s() is None
    made.advance(5.0)
    made.advance(3.0)
    assert made.now_s == 5.0
    made.start(decode(1))
    assert ends(made) == {1: (5.0, 7.0)}


def test_steps_that_end_together_end_in_the_order_in_which_they_were_started() -> None:
    for first, second in ((decode, prefill), (prefill, decode)):
        made = device(factor=1.5)
        for step_id, launch in enumerate((first, second, first, second)):
            made.start(launch(step_id))
        assert [(done.step_id, done.finished_s) for done in made.advance(100.0)] == [
            (0, 3.0), (1, 3.0), (2, 6.0), (3, 6.0),
        ]  # fmt: skip


@given(
    work=st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 40), st.floats(0, 3)), min_size=1, max_size=8),
    factor=st.floats(1.0, 3.0),
    host_s=st.sampled_from((0.0, 0.1)),
    cuts=st.lists(st.floats(0, 60), max_size=6),
)
@settings(max_examples=200, deadline=None)
def test_looking_in_between_changes_nothing(
    work: list[tuple[bool, bool, int, float]], factor: float, host_s: float, cuts: list[float]
) -> None:
    """Every step runs once, in the order of its lane, never faster than alone; stops on the way move no end."""

    def run(stops: list[float]) -> list[StepDone]:
        made, done = device(factor, host_s), []
        at_s = 0.0
        agenda: list[tuple[float, Launch | None]] = [(stop, None) for stop in stops]
        for step_id, (is_decode, whole, tokens, gap_s) in enumerate(work):
            at_s += gap_s
            sms = ALL if whole else HALF
            agenda.append((at_s, decode(step_id, sms) if is_decode else prefill(step_id, sms, tokens)))
        for moment_s, launch in sorted(agenda, key=lambda item: item[0]):
            done += made.advance(moment_s)
            if launch is not None:
                made.start(launch)
        return done + made.advance(1e6)

    plain, cut = run([]), run(cuts)
    assert sorted(d.step_id for d in plain) == list(range(len(work)))
    assert [d.finished_s for d in plain] == sorted(d.finished_s for d in plain)
    found = {d.step_id: d for d in cut}
    for done in plain:
        is_decode, whole, tokens, _ = work[done.step_id]
        alone_s = (1.0 if is_decode else tokens / 8) * (1 if whole else 2)
        assert alone_s - 1e-9 <= done.finished_s - done.started_s <= factor * alone_s + 1e-9
        assert found[done.step_id].finished_s == pytest.approx(done.finished_s, abs=1e-9)
    for lane in (True, False):
        ids = [d.step_id for d in plain if work[d.step_id][0] is lane]
        assert ids == sorted(ids)


LATTICE = Lattice.of_splits(ALL, (Partition(HALF, HALF),))


def test_waiting_moves_the_clock_to_whatever_comes_first() -> None:
    executor = VirtualExecutor(device(), LATTICE, [(5.0, Aborted(1)), (2.0, Aborted(2))])
    executor.start(decode(1))
    assert [type(event) for event in executor.wait(1.0)] == []
    assert executor.now_s() == 1.0
    assert kinds(executor.wait(10.0)) == ["step 1", "abort 2"], "steps that ended come before what was posted"
    assert executor.now_s() == 2.0
    assert kinds(executor.wait(10.0)) == ["abort 1"]
    assert not executor.has_work
    assert executor.wait(7.0) == []
    assert executor.now_s() == 7.0
    executor.post(Aborted(3))
    assert executor.has_work
    assert kinds(executor.wait(0.0)) == ["abort 3"], "the past is no reason to go back"
    assert executor.now_s() == 7.0


def test_a_step_that_begins_is_nothing_to_wake_up_for() -> None:
    executor = VirtualExecutor(device(host_s=0.5), LATTICE)
    executor.start(decode(1))
    assert kinds(executor.wait(10.0)) == ["step 1"]
    assert executor.now_s() == 2.5


def kinds(events: list[Event]) -> list[str]:
    return [f"step {e.step_id}" if isinstance(e, StepDone) else f"abort {e.request_id}" for e in events]  # type: ignore[union-attr]


def test_events_of_one_moment_keep_the_order_in_which_they_were_scheduled() -> None:
    executor = VirtualExecutor(device(), LATTICE, [(1.0, Aborted(i)) for i in range(20)])
    assert kinds(executor.wait(9.0)) == [f"abort {i}" for i in range(20)]


def test_a_lane_that_ends_by_rounding_before_its_neighbour_does_not_turn_time_back() -> None:
    made = device(factor=1.1)
    made.now_s = 1e6
    last_s = 0.0
    step = 0
    for _ in range(300):
        made.start(decode(step))
        made.start(prefill(step + 1, tokens=8))
        step += 2
        for done in made.advance(made.now_s + 1.0 / 3.0):
            assert done.finished_s >= last_s
            last_s = done.finished_s
    assert last_s == pytest.approx(1e6 + 100, abs=3)
