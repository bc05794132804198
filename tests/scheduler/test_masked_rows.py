"""Rows with a grammar: what they cost their neighbours, and how they end. (Whole histories: test_histories.)"""

from dataclasses import replace
from itertools import pairwise

import pytest

from bulletserve.core.events import Masked
from bulletserve.core.operators import StepShape
from bulletserve.core.plan import DecodeStep
from bulletserve.core.request import FinishReason, Request
from bulletserve.core.token_rules import NO_TOKEN, NO_TOKEN_LEFT
from bulletserve.scheduler.masked_rows import MaskedRows
from bulletserve.scheduler.policies.static_split import StaticSplit
from bulletserve.scheduler.policies.time_sliced import TimeSliced
from bulletserve.scheduler.policy import Policy
from bulletserve.simulator.truth import Uncapped
from tests.scheduler.world import TOTAL_SMS, Case, SlowGuide, World

STEP_S, ROW_S = 1.0, 1 / 64


class SteadyTruth(Uncapped):
    """Steps of about a second, and a little more for each row."""

    total_sms = TOTAL_SMS

    def alone_s(self, step: StepShape, sms: int) -> float:
        return STEP_S + ROW_S * (step.decode_rows + step.prefill_tokens)

    def beside_s(self, step: StepShape, sms: int, other: StepShape, other_sms: int) -> float:
        return self.alone_s(step, sms)


def steady_world(masked: int, free: int, mask_s: float, policy: Policy, tokens: int = 24) -> World:
    """All at once: `masked` requests with a grammar and `free` without."""
    requests = tuple(
        Request(i, range(100 * i, 100 * i + 4), tokens, 0.0, grammar="g" if i < masked else "")
        for i in range(masked + free)
    )
    case = Case(requests, total_blocks=200, max_seqs=16, mask_s=mask_s, num_layers=1)
    world = World(case, policy)
    world.device.inner.truth = SteadyTruth()
    return world


def ends_s(world: World, requests: range) -> dict[int, list[float]]:
    """When each token of these requests was drawn."""
    ends: dict[int, list[float]] = {request_id: [] for request_id in requests}
    at_seat: dict[int, int] = {}
    for launch, done in world.device.intervals:
        at_seat |= {seat.seat: seat.request_id for seat in launch.seats}
        for seat in (*[part.seat for part in launch.parts if part.samples], *launch.rows):
            if at_seat[seat] in ends:
                ends[at_seat[seat]].append(done.finished_s)
    return ends


def longest_gap_s(world: World, requests: range) -> float:
    """Between two tokens of one of these requests, once nobody's prompt is in the way any more."""
    since_s = max(times[0] for times in ends_s(world, range(len(world.case.requests))).values())
    return max(
        later - earlier
        for times in ends_s(world, requests).values()
        for earlier, later in pairwise(times)
        if earlier >= since_s
    )


@pytest.mark.parametrize("policy", [TimeSliced(64), StaticSplit(0.5, 64)])
@pytest.mark.parametrize("mask_s", [0.0, 0.25, 0.75, 3.0])
def test_neighbours_pay_for_the_rows_in_their_step_and_for_nothing_else(policy: Policy, mask_s: float) -> None:
    """However long masks take: a free row's gap is that of one step with all rows in it."""
    world = steady_world(masked=4, free=4, mask_s=mask_s, policy=policy).drain()
    world.check_answers()
    alone = steady_world(masked=0, free=4, mask_s=mask_s, policy=policy).drain()
    assert longest_gap_s(alone, range(4)) == pytest.approx(STEP_S + 4 * ROW_S)
    assert longest_gap_s(world, range(4, 8)) <= STEP_S + 8 * ROW_S + 1e-9


@pytest.mark.parametrize("mask_s", [0.0, 0.25, 0.75])
def test_a_mask_that_is_made_within_a_step_costs_its_row_every_second_one(mask_s: float) -> None:
    """Beside free rows, of which there are always some: the steps in which it is not drawn are theirs."""
    world = steady_world(masked=1, free=4, mask_s=mask_s, policy=TimeSliced(64), tokens=12)
    world.drain()
    assert longest_gap_s(world, range(1)) <= 2 * (STEP_S + 5 * ROW_S) + 1e-9


def test_alone_a_masked_row_waits_for_its_mask_only() -> None:
    world = steady_world(masked=1, free=0, mask_s=0.25, policy=TimeSliced(64)).drain()
    assert longest_gap_s(world, range(1)) == pytest.approx(STEP_S + ROW_S + 0.25)


def test_free_rows_stay_a_step_ahead_when_masks_come_late() -> None:
    """With no mask in sight, the loop waits until the running step is over and not longer."""
    world = steady_world(masked=1, free=3, mask_s=50.0, policy=TimeSliced(64)).drain()
    steps = [done for launch, done in world.device.intervals if isinstance(launch.step, DecodeStep)]
    assert all(later.started_s == earlier.finished_s for earlier, later in pairwise(steps[:20]))


class EndingGuide(SlowGuide):
    """Says at the third token what a test wants."""

    what = Masked(0, over=True)

    def _answer(self, request_id: int) -> None:
        if self.positions[request_id] == 4 + 3:
            self.executor.schedule(self.executor.now_s(), replace(self.what, request_id=request_id))
        else:
            super()._answer(request_id)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (Masked(0, over=True), FinishReason.STOP),
        (Masked(0, error="the grammar cannot be followed beyond 3 tokens"), FinishReason.REFUSED),
        (Masked(0, error="the log says more", ours=True), FinishReason.ERROR),
    ],
)
def test_a_grammar_that_is_complete_or_broken_ends_its_answer(what: Masked, reason: FinishReason) -> None:
    world = steady_world(masked=1, free=1, mask_s=0.25, policy=TimeSliced(64))
    world.guide.__class__ = EndingGuide
    world.guide.what = what  # type: ignore[attr-defined]
    world.drain()
    end = world.answers.finished[0]
    assert (end.reason, end.message) == (reason, what.error)
    assert len(world.answers.tokens[0]) == 3
    assert world.answers.finished[1].reason is FinishReason.LENGTH
    world.check_all_is_free()


@pytest.mark.parametrize("masked", [0, 1])
@pytest.mark.parametrize("tokens_before", [0, 3])
@pytest.mark.parametrize("policy", [TimeSliced(64), StaticSplit()])
def test_who_can_have_no_token_is_refused_and_hears_none(
    masked: int, tokens_before: int, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_of, case = Case.token_of, steady_world(masked, 3 - masked, 0.25, policy).case
    expected = [case.answer(request) for request in case.requests]

    def none_for_the_first(case: Case, request_id: int, position: int) -> int:
        if request_id == 0 and position >= 4 + tokens_before:
            return NO_TOKEN
        return token_of(case, request_id, position)

    monkeypatch.setattr(Case, "token_of", none_for_the_first)
    world = steady_world(masked, 3 - masked, 0.25, policy).drain()
    end = world.answers.finished[0]
    assert (end.reason, end.message, end.stop_id) == (FinishReason.REFUSED, NO_TOKEN_LEFT, None)
    assert world.answers.tokens.get(0, []) == expected[0][:tokens_before]
    assert [world.answers.tokens[n] for n in (1, 2)] == [expected[1], expected[2]]
    world.check_all_is_free()


def test_what_is_no_grammar_is_refused() -> None:
    world = steady_world(masked=1, free=1, mask_s=0.25, policy=TimeSliced(64))
    world.executor.schedule(0.125, Masked(0, error="this is no grammar"))
    world.drain()
    end = world.answers.finished[0]
    assert (end.reason, end.message) == (FinishReason.REFUSED, "this is no grammar")
    assert 0 not in world.answers.tokens
    world.check_all_is_free()


def test_requests_whose_grammar_is_being_compiled_are_nobodys_fault() -> None:
    """A policy that has nothing to start is not said to stand still."""
    world = steady_world(masked=2, free=0, mask_s=500.0, policy=TimeSliced(64), tokens=2)
    world.drain()
    world.check_answers()
    assert not world.loop.stalled


def test_an_engine_without_a_guide_refuses_grammars() -> None:
    world = steady_world(masked=1, free=1, mask_s=0.25, policy=TimeSliced(64))
    world.state._masked = MaskedRows(None)
    world.drain()
    assert world.answers.finished[0].reason is FinishReason.REFUSED
    assert "no grammars" in world.answers.finished[0].message
    assert world.answers.finished[1].reason is FinishReason.LENGTH
    world.check_all_is_free()
