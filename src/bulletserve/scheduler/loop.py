"""The loop: events in, plans made, steps started. The same for a GPU, CPU threads and the simulator.

Knows nothing about any of them. One turn: wait for anything to happen, take it in, show the policy what is, check
what it wants, start it, tell the owners. A turn is one decision. A policy that had something to do is asked again in a
turn that follows at once, until it has nothing to add: what was started and what the owners are told does not wait for
the next decision, which sees what has happened meanwhile.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from bulletserve.core.errors import BulletError, ConfigError, PlanError, PolicyError
from bulletserve.core.events import Arrived, Event, Status
from bulletserve.core.plan import Lane, Plan
from bulletserve.core.ports import Clock, Executor, Inbox, Outlet
from bulletserve.core.request import FinishReason
from bulletserve.core.snapshot import Snapshot
from bulletserve.scheduler.admissions import Admissions
from bulletserve.scheduler.engine_view import snapshot_of, status_of
from bulletserve.scheduler.plan_check import plan_check
from bulletserve.scheduler.policy import NoForecasts, Policy
from bulletserve.scheduler.stall_watch import LIMIT_S, MOST_TURNS, StallWatch
from bulletserve.scheduler.state import State

STATUS_PERIOD_S = 1.0

_log = logging.getLogger(__name__)

Observer = Callable[[float, Sequence[Event], Sequence[Plan]], None]


def both(one: Observer, other: Observer | None) -> Observer:
    """Tells `one` and then `other`, if there is another."""
    if other is None:
        return one

    def tell(now_s: float, events: Sequence[Event], plans: Sequence[Plan]) -> None:
        one(now_s, events, plans)
        other(now_s, events, plans)

    return tell


def what_failed(error: BaseException) -> str:
    """What requests are told when `Loop.run` raised `error`: ours says it all, another is a fault of the scheduler."""
    return str(error) if isinstance(error, BulletError) else f"the scheduler failed: {error!r}"


class Loop:
    """Owns a state and drives it. All methods belong to one thread.

    `observer` is called once a turn with the time, the events and the plans that were carried out; it may be set before
    the first turn. `turns`: how many so far. `unsettled`: the policy had something to do and may have more, so the next
    turn does not wait; never after `MOST_TURNS` plans in a row that started nothing while steps run, because a policy
    that admits and preempts in turn would hold a clock still that moves with events. `stalled`: what was told to the
    requests that the policy left lying, "" while it never did. Forecasts are those of the state's estimator.

    Raises `ConfigError` for a policy that needs forecasts where there are none.
    """

    def __init__(
        self,
        state: State,
        policy: Policy,
        executor: Executor,
        inbox: Inbox,
        clock: Clock,
        outlet: Outlet,
        observer: Observer | None = None,
    ) -> None:
        if policy.needs_forecasts and state.estimator is None:
            raise ConfigError(
                f"the policy {policy.name} needs a calibration of this model on this device: run bullet calibrate, or "
                "choose another --policy"
            )
        self._estimator = state.estimator or NoForecasts()
        self.state = state
        self.policy = policy
        self._executor = executor
        self._inbox = inbox
        self._clock = clock
        self._outlet = outlet
        self.observer = observer
        self.turns = 0
        self._status_due_s = 0.0
        self._events: Iterator[Event] = iter(())
        self.unsettled = False
        self._without_start = 0
        self.stalled = ""
        self._stall = StallWatch()
        self._admissions = Admissions()

    def run(self) -> str:
        """Turn until stopped. Returns the device's fault, or "" after an orderly stop.

        Whatever happens, every open request is answered before this returns or raises.
        """
        state = self.state
        reason, message = FinishReason.ABORT, "the engine was stopped"
        try:
            while not (state.stopped or state.fault):
                self.turn()
            if state.fault:
                reason, message = FinishReason.ERROR, state.fault
        except BaseException as error:
            reason, message = FinishReason.ERROR, what_failed(error)
            raise
        finally:
            state.end_all(reason, message, [event.request for event in self.unheard() if isinstance(event, Arrived)])
            self._tell(self._clock.now_s())
        return state.fault

    def unheard(self) -> list[Event]:
        """Events that the state has not seen and, once given away, never will: those there are, and the rest of a turn
        that an exception left."""
        return [*self._events, *self._inbox.wait(0.0)]

    def turn(self) -> None:
        """Wait for something, take it in, decide, start, tell."""
        events = self._inbox.wait(0.0 if self.unsettled else self._status_due_s)
        self.handle(events)

    def handle(self, events: Sequence[Event]) -> None:
        """The turn after the wait."""
        now_s = self._clock.now_s()
        state = self.state
        self._events = iter(events)
        for event in self._events:
            state.apply(event, now_s)
        plans = () if state.stopped or state.fault else self._decide(now_s)
        if self._stall.is_over(state.lying > 0, now_s):
            self._give_up()
        elif self._stall.is_worth_a_word():
            _log.warning("%s: it has %.0f s left to", self._standstill(), LIMIT_S - self._stall.seconds)
        self._tell(now_s)
        self.turns += 1
        if now_s >= self._status_due_s:
            self._status_due_s = now_s + STATUS_PERIOD_S
            self._outlet.report(self._status(now_s))
        if self.observer is not None:
            self.observer(now_s, events, plans)

    def _status(self, now_s: float) -> Status:
        busy_s = self.state.lanes.busy_s
        return replace(
            status_of(self.state, now_s, self.turns),
            standing_s=self._stall.seconds if self._stall.stands else 0.0,
            switches=self.state.lanes.switches,
            prefill_busy_s=busy_s[Lane.PREFILL],
            decode_busy_s=busy_s[Lane.DECODE],
        )

    def _decide(self, now_s: float) -> Sequence[Plan]:
        self.unsettled = False
        if self.state.lanes_are_full or self.state.waits_for_masks:
            return ()  # nothing can start before a step ends, and then we are here again
        plan = self._ask(snapshot_of(self.state, now_s))
        if plan.is_empty:
            self._without_start = 0
            return ()
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%.6f %s", now_s, plan)
        self.state.carry_out(plan, now_s, self._executor.start)
        self._admissions.note(plan.admit, now_s)
        self._without_start = 0 if plan.starts else self._without_start + 1
        self.unsettled = not self.state.steps or self._without_start < MOST_TURNS
        return (plan,)

    def _ask(self, snapshot: Snapshot) -> Plan:
        """The policy's plan, which may be carried out. Raises `PolicyError`: others write policies too."""
        try:
            plan = self.policy.decide(snapshot, self._estimator)
            if not plan.is_empty:
                plan_check(snapshot, plan)
            return plan
        except PlanError as error:
            raise PlanError(f"the policy {self.policy.name} broke a rule of plans: {error}") from error
        except BulletError:
            raise
        except (Exception, SystemExit) as error:
            raise PolicyError(f"the policy {self.policy.name} failed: {error!r}") from error

    def _give_up(self) -> None:
        """End what the policy leaves lying. The engine goes on: perhaps one odd request was in the way of all."""
        self.stalled = self._standstill()
        _log.error("%s: they end with an error", self.stalled)
        self.state.fail_all(self.stalled)

    def _standstill(self) -> str:
        return (
            f"the policy {self.policy.name} has started nothing for {self._stall.seconds:.0f} s ({self._stall.turns} "
            f"turns), though nothing runs and {self.state.lying} requests wait"
        )

    def _tell(self, now_s: float) -> None:
        output = self.state.take_output(now_s)
        if output is not None:
            self._outlet.emit(self._admissions.told(output))
