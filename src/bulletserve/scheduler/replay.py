"""A recorded run, decided again.

Knows nothing about files. The loop, the state and the rules of plans are the ones that served; time, events and plans
come from the record. Every decision is made again from the rebuilt snapshot and compared, and then the *recorded* plan
is carried out: so each comparison is at a state that really was, also after a difference, and also for another policy
than the recorded one. What another policy's plan would have led to is not in a record: the events are those of the
plans that were carried out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from bulletserve.core.errors import BulletError, ConfigError, PolicyError, RecordError
from bulletserve.core.events import Event, Output, Status
from bulletserve.core.launch import Launch
from bulletserve.core.plan import Plan
from bulletserve.core.ports import Outlet
from bulletserve.core.shapes import ModelShape
from bulletserve.core.snapshot import Limits, Snapshot, check_limits
from bulletserve.estimator.calibration import Calibration
from bulletserve.estimator.estimator import Estimator
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.loop import Loop
from bulletserve.scheduler.policies import make_policy
from bulletserve.scheduler.policy import Forecaster, Policy
from bulletserve.scheduler.queue_rules import ORDERINGS, QueueRules
from bulletserve.scheduler.state import State
from bulletserve.telemetry.record_format import Turn


@dataclass(frozen=True)
class RecordedEngine:
    """What decisions depend on beside events. `policy` as in `--policy`; `estimator` None: there were no forecasts."""

    policy: str
    limits: Limits
    caching: bool
    estimator: Estimator | None

    def header(self, **more: Any) -> dict[str, Any]:
        """As the first line of a record; `more`: where the run comes from."""
        known = self.estimator
        return {
            "policy": self.policy,
            "limits": msgspec.to_builtins(self.limits),
            "caching": self.caching,
            "calibration_hash": None if known is None else known.calibration.hash,
            "calibration": None if known is None else known.calibration.to_json(),
            "shape": None if known is None else msgspec.to_builtins(known.shape),
            "dtype_bytes": None if known is None else known.dtype_bytes,
        } | more

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> "RecordedEngine":
        """The inverse of `header`. Raises `RecordError`."""
        try:
            estimator = None
            if header["calibration"] is not None:
                calibration = Calibration.from_json(header["calibration"])
                if calibration.hash != header["calibration_hash"]:
                    raise RecordError("the record's calibration is not the one that it names")
                shape, dtype_bytes = ModelShape.from_json(header["shape"]), int(header["dtype_bytes"])
                if not 1 <= dtype_bytes <= 8:
                    raise ValueError(f"no number has {dtype_bytes} bytes")
                estimator = Estimator(calibration, shape, dtype_bytes)
            limits = msgspec.convert(header["limits"], Limits)
            check_limits(limits)
            return cls(str(header["policy"]), limits, bool(header["caching"]), estimator)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, ConfigError) as error:
            raise RecordError(f"the record's header does not describe an engine ({error!r})") from error


class Difference(NamedTuple):
    """A decision that came out otherwise. `place`: which one of its turn. An empty plan: nothing was (is) added."""

    line: int
    now_s: float
    place: int
    recorded: Plan
    decided: Plan


class Replay:
    """Decides a run again. `policy` None: as recorded. `turns`, `decisions`: how many so far.

    `outlet` hears again what the requests' owners heard, at the recorded times.
    """

    def __init__(self, engine: RecordedEngine, policy: str | None = None, outlet: Outlet | None = None) -> None:
        recorded = make_policy(engine.policy)
        limits = engine.limits
        ledger = KvLedger(limits.total_blocks + 1, limits.block_size, engine.caching)
        state = State(limits, ledger, recorded.rules, engine.estimator, _Recorded())
        self.turns = 0
        self._judge = _Judge(recorded if policy is None else make_policy(policy), recorded.rules)
        self._world = _World(limits)
        self._loop = Loop(state, self._judge, self._world, self._world, self._world, outlet or self._world)

    @property
    def decisions(self) -> int:
        """How many were made again."""
        return self._judge.decisions

    def differences(self, turns: Iterable[Turn]) -> Iterator[Difference]:
        """Those of each turn. Raises `RecordError` for a turn that cannot have followed those before it, `PolicyError`
        where the policy fails."""
        for turn in turns:
            self._world.time_s = turn.now_s
            try:
                self._again(turn)
            except (BulletError, LookupError, ValueError, TypeError, ArithmeticError, AssertionError) as error:
                yield from self._judge.found
                if isinstance(error, RecordError) or type(error) is PolicyError:
                    raise
                why = f"{type(error).__name__}: {error}"
                raise RecordError(
                    f"line {turn.line}: this cannot have followed what comes before it ({why})"
                ) from error
            yield from self._judge.found

    def _again(self, turn: Turn) -> None:
        self.turns += 1
        self._judge.begin(turn)
        self._loop.handle(turn.events)
        while self._judge.left and self._loop.unsettled:
            self._loop.handle(())  # records of before 2026-12 have several decisions in a turn
        if self._judge.left:
            raise RecordError(f"line {turn.line}: it has plans for which nobody was asked")


class _Judge:
    """Stands in the policy's place: asks it, compares, and answers with what was recorded."""

    needs_forecasts = False

    def __init__(self, policy: Policy, rules: QueueRules) -> None:
        self._policy, self.rules = policy, rules
        self.name = policy.name
        self.needs_forecasts = policy.needs_forecasts
        self.decisions = 0
        self.found: list[Difference] = []

    def begin(self, turn: Turn) -> None:
        """The next turn."""
        self._turn, self._place, self.found = turn, 0, []

    @property
    def left(self) -> bool:
        """Whether plans of the turn were not asked for."""
        return self._place < len(self._turn.plans)

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        """The recorded plan."""
        decided = self._policy.decide(as_kept_by(self._policy.rules, self.rules, snapshot), estimator)
        recorded = self._turn.plans[self._place] if self.left else Plan()
        if decided._replace(because="") != recorded._replace(because=""):
            self.found.append(Difference(self._turn.line, self._turn.now_s, self._place, recorded, decided))
        self._place += 1
        self.decisions += 1
        return recorded


def as_kept_by(rules: QueueRules, recorded: QueueRules, snapshot: Snapshot) -> Snapshot:
    """The snapshot with the shown part of its queue as other rules than the recorded ones would keep it."""
    if rules == recorded:
        return snapshot
    shown = (*snapshot.waiting, *snapshot.late)
    late: tuple[Any, ...] = ()
    total = snapshot.waiting_total + snapshot.late_total
    if rules.admission == "timely":
        late = tuple([one for one in shown if one.lost_s < snapshot.now_s and not one.preempted])
    in_time = sorted((one for one in shown if one not in late), key=ORDERINGS[rules.ordering])
    return snapshot._replace(waiting=tuple(in_time), late=late, waiting_total=total - len(late), late_total=len(late))


class _Recorded:
    """The guide of a run that is over: its answers are among the events."""

    def begin(self, request_id: int, grammar: str) -> None:
        """It answered then."""

    def follow(self, request_id: int, token: int) -> None:
        """As `begin`."""

    def forget(self, request_id: int) -> None:
        """As `begin`."""


class _World:
    """Clock, inbox, executor and outlet of a run that is over."""

    def __init__(self, limits: Limits) -> None:
        self.lattice = limits.lattice
        self.time_s = 0.0

    def now_s(self) -> float:
        """The recorded time."""
        return self.time_s

    def wait(self, deadline_s: float) -> Sequence[Event]:
        """Nothing: turns are handed to the loop."""
        return ()

    def start(self, launch: Launch) -> None:
        """It was started then."""

    def emit(self, output: Output) -> None:
        """They were told then."""

    def report(self, status: Status) -> None:
        """As `emit`."""

    def close(self) -> None:
        """Nothing to release."""
