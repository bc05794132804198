"""Whole histories: the real scheduler over checked arithmetic, with everything that may go wrong going wrong.

Whatever is preempted, delayed, aborted or failed, every request is answered once, with the tokens that it would
have heard alone, and afterwards nothing is held.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bulletserve.core.events import Stop
from bulletserve.core.request import FinishReason, Request
from bulletserve.scheduler.policies.bullet import Bullet
from bulletserve.scheduler.policies.chunked_prefill import ChunkedPrefill
from bulletserve.scheduler.policies.static_split import StaticSplit
from bulletserve.scheduler.policies.time_sliced import TimeSliced
from bulletserve.scheduler.policy import Policy
from tests.examples import examples
from tests.scheduler.cases import cases, moments
from tests.scheduler.random_policy import RandomPolicy
from tests.scheduler.world import TOTAL_SMS, Case, World, lanes_of

budgets = st.sampled_from((1, 2, 3, 5, 8, 16, 64, 2048))
POLICIES = {
    "time_sliced": st.builds(TimeSliced, budgets),
    "chunked_prefill": st.builds(ChunkedPrefill, budgets),
    "static_split": st.builds(
        StaticSplit, st.sampled_from((0.1, 0.5, 0.75, 0.9)), budgets, st.sampled_from(("whole", "share"))
    ),
    "bullet": st.builds(
        Bullet,
        ways=st.sampled_from(("split+sliced+mixed", "split", "sliced", "mixed")),
        pause=st.sampled_from(("yes", "no")),
        mixed_longer=st.sampled_from((1.0, 1.4)),
    ),
    "chunked_prefill_triage": st.builds(
        ChunkedPrefill, budgets, ordering=st.just("slack"), admission=st.sampled_from(("timely", "triage"))
    ),
    "random": st.builds(RandomPolicy, st.integers(0, 10_000)),
}
quick = settings(
    max_examples=examples(100),
    phases=[Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data(), case=cases())
@quick
def test_every_history_ends_well(name: str, data: st.DataObject, case: Case) -> None:
    policy: Policy = data.draw(POLICIES[name])
    world = World(case, policy).drain()
    world.check_answers()
    world.check_all_is_free()


@given(case=cases(), seed=st.integers(0, 10_000))
@quick
def test_a_policy_may_refuse_whom_it_likes(case: Case, seed: int) -> None:
    policy = RandomPolicy(seed, refuses=True)
    world = World(case, policy).drain()
    world.check_all_is_free()
    ends = world.answers.finished
    assert ends.keys() == {request.id for request in case.requests}
    for request_id in policy.refused:
        assert (ends[request_id].reason, ends[request_id].retry_after_s) == (FinishReason.REFUSED, 1.0)


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data(), case=cases(fatal=True), stop_s=moments)
@quick
def test_whatever_ends_the_loop_everyone_is_answered(name: str, data: st.DataObject, case: Case, stop_s: float) -> None:
    world = World(case, data.draw(POLICIES[name]))
    world.executor.schedule(stop_s, Stop())
    fault = world.loop.run()
    heard = {request.id for request in case.requests if request.arrival_s <= world.executor.now_s()}
    assert world.answers.finished.keys() == heard
    if fault:
        assert fault == "a step failed"
    elif world.state.stopped:
        reasons = {world.answers.finished[request_id].reason for request_id in heard}
        assert FinishReason.ERROR not in reasons or case.failing
    for request in case.requests:
        told = world.answers.tokens.get(request.id, [])
        assert told == case.answer(request)[: len(told)]


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data(), case=cases())
@settings(quick, max_examples=examples(50))
def test_steps_keep_the_order_of_their_lanes(name: str, data: st.DataObject, case: Case) -> None:
    """A lane's steps run one after the other, a step on all SMs after everything that was started before it."""
    world = World(case, data.draw(POLICIES[name])).drain()
    ends = {launch.step_id: done for launch, done in world.device.intervals}
    assert [launch.step_id for launch in world.device.started] == list(range(len(ends)))
    for at, launch in enumerate(world.device.started):
        whole = launch.step.sms == TOTAL_SMS
        for earlier in world.device.started[:at]:
            if whole or set(lanes_of(launch)) & set(lanes_of(earlier)):
                assert ends[earlier.step_id].finished_s <= ends[launch.step_id].started_s


def busy_case(**changes: Any) -> Case:
    """Twelve requests that arrive while others are served."""
    requests = tuple(Request(i, range(100 * i, 100 * i + 24), 12, i / 2) for i in range(12))
    return replace(Case(requests, total_blocks=200, max_seqs=12), **changes)


def overlap_s(world: World) -> float:
    """Seconds in which both lanes were busy."""
    spans = [(d.started_s, d.finished_s, launch.lane) for launch, d in world.device.intervals]
    return sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for at, (start, end, lane) in enumerate(spans)
        for other_start, other_end, other_lane in spans[:at]
        if lane is not other_lane
    )


@pytest.mark.parametrize(
    ("policy", "overlaps"),
    [
        (TimeSliced(16), False),
        (ChunkedPrefill(16), False),
        (StaticSplit(0.5, 16), True),
        (StaticSplit(0.5, 16, "share"), True),
    ],
)
def test_only_static_split_has_both_lanes_busy_at_once(policy: Policy, overlaps: bool) -> None:
    world = World(busy_case(), policy).drain()
    world.check_answers()
    assert (overlap_s(world) > 1) is overlaps
    assert world.state.lanes.both_busy_s == pytest.approx(overlap_s(world))


def test_these_histories_are_as_rough_as_they_claim() -> None:
    """What the properties above are about really happens in such histories."""
    crowd = tuple(replace(request, arrival_s=request.id / 16, max_tokens=20) for request in busy_case().requests)
    tight = busy_case(requests=crowd, total_blocks=16)
    for policy in (TimeSliced(16), ChunkedPrefill(16), StaticSplit(0.5, 16)):
        world = World(tight, policy).drain()
        world.check_answers()
        assert world.state.preemptions >= 3
        first = world.answers.finished.keys()
        assert next(iter(first)) == 0, "the first to come was not the first to be done"
    alike = tuple(replace(request, prompt_ids=range(24)) for request in tight.requests)
    world = World(replace(tight, requests=alike), TimeSliced(16)).drain()
    assert world.state.prefixes.hit_tokens > 100
    assert max(world.answers.cached.values()) == 20
