"""The device made of arithmetic, with arithmetic that fits in a head."""

from dataclasses import dataclass

import pytest

from bulletserve.core.events import Aborted, Event, StepDone
from bulletserve.core.launch import Launch, PromptPart, Seat
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import DecodeStep, MixedStep, PrefillGroup
from bulletserve.simulator.device import SimulatedDevice, counting_token
from bulletserve.simulator.executor import VirtualExecutor
from bulletserve.simulator.truth import Work

ALL, HALF = 8, 4
LAYERS = 4


@dataclass
class PlainTruth:
    """A second per 8 prompt tokens or per row on all SMs; twice that on half; beside another, `factor` times."""

    factor: float = 1.0
    total_sms: int = ALL

    def alone_s(self, work: Work, sms: int) -> float:
        return work.layers_share * (work.prompt_tokens / 8 + work.rows) * ALL / sms

    def slowdown(self, work: Work, beside: Work) -> float:
        return self.factor


def device(factor: float = 1.0) -> SimulatedDevice:
    made = SimulatedDevice(PlainTruth(factor), LAYERS)
    for seat in range(4):
        made.start(Launch(1000 + seat, DecodeStep("all", ALL), seats=(card(seat),), rows=()))
    made.advance(0.0)
    return made


def card(seat: int) -> Seat:
    return Seat(seat, 10 + seat, (1,) * 8, 0, (1, 2), 0.0, 1.0, 0, 0)


def decode(step_id: int, sms: int = HALF, rows: tuple[int, ...] = (0,)) -> Launch:
    return Launch(step_id, DecodeStep("all", sms), rows=rows)


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
    """Half speed beside each other: decode needs 2 s of work, so 4 s; prefill has 6 s of work, 2 s of it done by
    then, and 4 s alone."""
    made = device(factor=2.0)
    made.start(decode(1))
    made.start(prefill(2, tokens=24))
    assert ends(made) == {1: (0.0, 4.0), 2: (0.0, 8.0)}


def test_a_neighbour_that_comes_later_slows_only_what_is_left() -> None:
    made = device(factor=2.0)
    made.start(prefill(1, tokens=16))
    assert ends(made, 3.0) == {}
    made.start(decode(2))
    assert made.next_end_s() == 5.0
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
    mixed = MixedStep((11,), ((0, 8),), "all", ALL)
    made.start(Launch(2, mixed, parts=(PromptPart(1, 0, 8, True),), rows=(0,)))
    made.start(decode(3))
    made.start(prefill(4))
    assert ends(made) == {1: (0.0, 2.0), 2: (2.0, 4.0), 3: (4.0, 6.0), 4: (4.0, 6.0)}


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


def test_time_moves_only_forwards_and_by_itself_nothing_happens() -> None:
    made = device()
    assert made.next_end_s() is None
    made.advance(5.0)
    made.advance(3.0)
    assert made.now_s == 5.0
    made.start(decode(1))
    assert ends(made) == {1: (5.0, 7.0)}


def test_simultaneous_ends_come_in_the_same_order_every_time() -> None:
    def order() -> list[int]:
        made = device(factor=1.5)
        made.start(decode(1))
        made.start(prefill(2))
        made.start(decode(3))
        made.start(prefill(4))
        return [done.step_id for done in made.advance(100.0)]

    assert all(order() == [1, 2, 3, 4] or order() == [2, 1, 4, 3] for _ in range(5))
    assert len({tuple(order()) for _ in range(20)}) == 1


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
