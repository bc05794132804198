"""The loop's own promises: whoever fails, everyone is answered; what it reports; and that it never stalls."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from bulletserve.core.errors import PlanError, PolicyError
from bulletserve.core.events import Arrived, CacheReset, Event, StepDone, Stop
from bulletserve.core.launch import Launch
from bulletserve.core.plan import DecodeStep, Plan
from bulletserve.core.request import FinishReason, Request
from bulletserve.core.snapshot import Snapshot, Victim
from bulletserve.scheduler import engine_view
from bulletserve.scheduler.decode_set import DecodeSet
from bulletserve.scheduler.loop import STATUS_PERIOD_S
from bulletserve.scheduler.policies.static_split import StaticSplit
from bulletserve.scheduler.policies.time_sliced import TimeSliced
from bulletserve.scheduler.policy import Forecaster, Policy
from bulletserve.scheduler.queue_rules import QueueRules
from bulletserve.scheduler.stall_watch import MOST_TURNS
from tests.scheduler.test_histories import busy_case
from tests.scheduler.world import TOTAL_SMS, Case, World


class Saboteur:
    """A sober policy until its n-th decision."""

    name = "saboteur"
    needs_forecasts = False
    rules = QueueRules()

    def __init__(self, decisions: int, then: Callable[[Snapshot], Plan]) -> None:
        self._left = decisions
        self._then = then
        self._sober = TimeSliced(16)

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        self._left -= 1
        return self._then(snapshot) if self._left < 0 else self._sober.decide(snapshot, estimator)


def fail(snapshot: Snapshot) -> Plan:
    raise ZeroDivisionError("no")


def leave(snapshot: Snapshot) -> Plan:
    sys.exit(3)


def interrupt(snapshot: Snapshot) -> Plan:
    raise KeyboardInterrupt


def break_a_rule(snapshot: Snapshot) -> Plan:
    return Plan(starts=(DecodeStep(TOTAL_SMS + 1),))


def return_nothing(snapshot: Snapshot) -> Plan:
    return None  # type: ignore[return-value]


def start_nonsense(snapshot: Snapshot) -> Plan:
    return Plan(starts=("prefill", 3))  # type: ignore[arg-type]


def check_all_answered(world: World, message: str) -> None:
    assert world.answers.finished.keys() == {request.id for request in world.case.requests}
    errors = [end for end in world.answers.finished.values() if end.reason is FinishReason.ERROR]
    assert errors
    assert all(message in end.message for end in errors)
    assert not any(end.reason is FinishReason.ABORT for end in world.answers.finished.values())


@pytest.mark.parametrize("decisions", [0, 1, 5, 30])
@pytest.mark.parametrize(
    ("then", "error", "words"),
    [
        (fail, PolicyError, "the policy saboteur failed: ZeroDivisionError('no')"),
        (leave, PolicyError, "the policy saboteur failed: SystemExit(3)"),
        (return_nothing, PolicyError, "the policy saboteur failed: AttributeError"),
        (start_nonsense, PolicyError, "the policy saboteur failed: "),
        (break_a_rule, PlanError, "the policy saboteur broke a rule of plans: "),
        (interrupt, KeyboardInterrupt, "the scheduler failed"),
    ],
)
def test_a_policy_that_fails(
    then: Callable[[Snapshot], Plan], error: type[BaseException], words: str, decisions: int
) -> None:
    world = World(at_once(busy_case()), Saboteur(decisions, then))
    with pytest.raises(error):
        world.loop.run()
    check_all_answered(world, words)


class Lazy:
    """Starts nothing before a moment, and then is sober."""

    name = "lazy"
    needs_forecasts = False
    rules = QueueRules()

    def __init__(self, until_s: float, admit: bool = False) -> None:
        self._until_s, self._admit = until_s, admit
        self._sober = TimeSliced(16)

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        if snapshot.now_s >= self._until_s:
            return self._sober.decide(snapshot, estimator)
        if self._admit and snapshot.waiting and not snapshot.admitted:
            return Plan(admit=(snapshot.waiting[0].request_id,))
        return Plan()


def lying(until_s: float, *, admit: bool = False) -> World:
    """Three requests at once; one long after."""
    times = (0.0, 0.0, 0.0, 100.0)
    requests = tuple(Request(number, range(10), 3, at_s) for number, at_s in enumerate(times))
    return World(Case(requests), Lazy(until_s, admit))


@pytest.mark.parametrize("admit", [False, True])
def test_what_a_policy_leaves_lying_is_answered_and_the_engine_goes_on(
    admit: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = lying(50.0, admit=admit).drain()
    ends = world.answers.finished
    assert [ends[number].reason for number in range(4)] == [FinishReason.ERROR] * 3 + [FinishReason.LENGTH]
    assert (
        f"the policy lazy has started nothing for 30 s ({31 + admit} turns), though nothing runs and 3 requests wait"
        in ends[0].message
    )
    assert world.loop.stalled == ends[0].message
    world.check_all_is_free()
    said = [(record.levelname, record.message) for record in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "ERROR"]
    assert "nothing for 5 s" in said[0][1] and "25 s left" in said[0][1]


def test_a_standstill_shows_in_the_status_while_it_lasts() -> None:
    statuses = lying(20.0).drain().answers.statuses
    standing_s = [status.standing_s for status in statuses]
    assert max(standing_s) > 15.0
    assert standing_s[-1] == 0.0
    assert all(status.standing_s == 0.0 or status.running + status.waiting for status in statuses)


def test_the_status_tells_of_lanes_and_switches() -> None:
    last = World(busy_case(), TimeSliced(16)).drain().answers.statuses[-1]
    assert last.prefill_busy_s > 0.0 and last.decode_busy_s > 0.0


def test_who_comes_after_a_standstill_has_as_long_as_others() -> None:
    requests = tuple(Request(number, range(10), 3, at_s) for number, at_s in enumerate((0.0, 30.2, 100.0)))
    ends = World(Case(requests), Lazy(50.0)).drain().answers.finished
    assert (ends[0].reason, ends[1].reason) == (FinishReason.ERROR, FinishReason.LENGTH)


def test_a_policy_that_waits_a_while_may(caplog: pytest.LogCaptureFixture) -> None:
    world = lying(20.0).drain()
    world.check_answers()
    assert not world.loop.stalled
    assert [record.levelname for record in caplog.records] == ["WARNING"], "told once"


class Undecided:
    """Admits and preempts in turn: always busy, never at work."""

    name = "undecided"
    needs_forecasts = False
    rules = QueueRules()

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        if snapshot.waiting:
            return Plan(admit=(snapshot.waiting[0].request_id,))
        return Plan(preempt=tuple(entry.request_id for entry in snapshot.admitted))


def test_plans_without_end_that_start_nothing_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a virtual clock, which does not move meanwhile."""
    monkeypatch.setattr(
        engine_view, "cheapest_victims", lambda decoding, admitted, ledger: [Victim(0, 1, False, False)]
    )
    monkeypatch.setattr(DecodeSet, "blocks_needed", 1000)
    world = World(Case((Request(0, range(10), 3, 0.0),)), Undecided()).drain()
    assert world.answers.finished[0].reason is FinishReason.ERROR
    assert world.executor.now_s() == 0.0 and "nothing for 0 s (10000 turns)" in world.loop.stalled


class UndecidedBeside:
    """Admits and preempts in turn for as long as a decode step runs."""

    name = "undecided beside"
    needs_forecasts = False
    rules = QueueRules()

    def __init__(self) -> None:
        self._sober = StaticSplit(0.5, 16)

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        if snapshot.decode_lane.queued:
            admitted = {entry.request_id for entry in snapshot.admitted}
            for victim in snapshot.victims:
                if victim.request_id in admitted:
                    return Plan(preempt=(victim.request_id,))
            first = next(iter(snapshot.waiting), None)
            if first is not None and snapshot.free_seats and first.prompt_blocks <= snapshot.free_blocks:
                return Plan(admit=(first.request_id,))
        elif snapshot.decode_rows > 2 and snapshot.decode_blocks_needed <= snapshot.free_blocks:
            return Plan((DecodeStep(min(snapshot.limits.lattice.decode_shares)),))
        return self._sober.decide(snapshot, estimator)


def test_plans_without_end_that_start_nothing_do_not_stop_the_clock_of_what_runs() -> None:
    crowd = tuple(replace(request, arrival_s=request.id / 16, max_tokens=20) for request in busy_case().requests)
    world = World(busy_case(requests=crowd, block_size=1, total_blocks=76), UndecidedBeside()).drain()
    world.check_answers()
    world.check_all_is_free()
    assert world.state.preemptions > MOST_TURNS / 4, "it was undecided for long"


def at_once(case: Case) -> Case:
    """The same requests, all at the beginning."""
    return replace(case, requests=tuple(replace(request, arrival_s=0.0) for request in case.requests))


def test_an_executor_that_fails() -> None:
    world = World(at_once(busy_case()), TimeSliced(16))
    start = world.device.start

    def start_some(launch: Launch) -> None:
        if launch.step_id == 5:
            raise OSError("no device")
        start(launch)

    world.device.start = start_some  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no device"):
        world.loop.run()
    check_all_answered(world, "no device")


def test_a_device_that_will_never_work_again() -> None:
    world = World(at_once(busy_case(fatal=3)), TimeSliced(16))
    assert world.loop.run() == "a step failed"
    check_all_answered(world, "a step failed")


def test_who_was_not_heard_yet_is_answered_too() -> None:
    """An event that cannot be taken in, a request behind it, and one that is posted while the loop ends."""
    world = World(busy_case(), TimeSliced(16))
    late = Request(98, (1, 2), 3, 0.0)
    later = Request(99, (1, 2), 3, 0.0)
    emit = world.answers.emit
    world.executor.schedule(0.0, StepDone(12345, (), 0.0, 0.0))
    world.executor.schedule(0.0, Arrived(late))
    wait = world.executor.wait

    def wait_and_post(deadline_s: float) -> Sequence[Event]:
        events = wait(deadline_s)
        world.executor.post(Arrived(later))
        return events

    world.executor.wait = wait_and_post  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        world.loop.run()
    assert world.answers.emit == emit
    assert {0, 98, 99} <= world.answers.finished.keys()


def test_a_stop_ends_what_is_open_with_abort() -> None:
    world = World(at_once(busy_case()), TimeSliced(16))
    world.executor.schedule(2.0, Stop())
    assert world.loop.run() == ""
    reasons = {end.reason for end in world.answers.finished.values()}
    assert FinishReason.ABORT in reasons
    assert reasons <= {FinishReason.ABORT, FinishReason.LENGTH}
    assert len(world.answers.finished) == 12


class OneByOne:
    """Admits a single request per plan, and starts only when nobody waits."""

    name = "one_by_one"
    needs_forecasts = False
    rules = QueueRules()

    def __init__(self) -> None:
        self._sober = TimeSliced(1000)

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        if snapshot.waiting and snapshot.free_seats:
            return Plan(admit=(snapshot.waiting[0].request_id,))
        return self._sober.decide(snapshot, estimator)


def test_plans_that_start_nothing_are_followed_by_others_at_once() -> None:
    """With no step under way no event will come, so the loop must not wait for one."""
    case = at_once(busy_case())
    assert len(case.requests) > 1
    world = World(case, OneByOne()).drain()
    world.check_answers()
    first = min(done.started_s for _, done in world.device.intervals)
    assert first == 0.0


def test_status_comes_every_second_and_counts() -> None:
    world = World(busy_case(), TimeSliced(16)).drain()
    statuses = world.answers.statuses
    assert max(b.now_s - a.now_s for a, b in pairwise(statuses)) <= STATUS_PERIOD_S + 2.0
    busy = [status for status in statuses if status.running]
    assert busy
    assert all(status.used_blocks for status in busy)
    assert all(status.oldest_step_s >= 0 for status in statuses)
    assert [status.turns for status in statuses] == sorted(status.turns for status in statuses)
    assert statuses[-1].total_blocks == 200


def test_the_observer_sees_each_turns_events_and_plans() -> None:
    turns: list[tuple[float, Sequence[Event], Sequence[Plan]]] = []
    world = World(busy_case(), TimeSliced(16))
    world.loop.observer = lambda now_s, events, plans: turns.append((now_s, events, plans))
    world.drain()
    events = [event for _, seen, _ in turns for event in seen]
    assert sum(isinstance(event, Arrived) for event in events) == 12
    assert sum(isinstance(event, StepDone) for event in events) == len(world.device.started)
    starts = [start for _, _, plans in turns for plan in plans for start in plan.starts]
    assert starts == [launch.step for launch in world.device.started]
    assert not any(plan.is_empty for _, _, plans in turns for plan in plans)


def test_a_cache_reset_forgets_prefixes() -> None:
    requests = tuple(Request(i, range(24), 2, 10.0 * i) for i in range(3))
    world = World(Case(requests), TimeSliced(64))
    world.executor.schedule(15.0, CacheReset())
    world.drain()
    assert world.answers.cached == {0: 0, 1: 20, 2: 0}


def test_policies_are_replayable() -> None:
    """The same history twice gives the same steps: nothing depends on anything but the events."""

    def steps(policy: Policy) -> list[Launch]:
        return World(busy_case(total_blocks=20), policy).drain().device.started

    assert steps(TimeSliced(16)) == steps(TimeSliced(16))
