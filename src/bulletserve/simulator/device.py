"""A device made of arithmetic: two lanes that carry steps, at the speed that a truth gives them.

Knows nothing about threads or real time: somebody else moves its clock. Steps on a lane run in order; a step that
asks for all SMs waits for everything started before it. While both lanes run, each is slowed by what runs beside
it, so a step's end moves when its neighbour starts or stops.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bulletserve.core.events import StepDone
from bulletserve.core.launch import Launch
from bulletserve.core.plan import Lane, PrefillGroup, lanes_of
from bulletserve.simulator.truth import Truth, Work

TokenOf = Callable[[int, int], int]
"""(request id, number of tokens before it) -> token id."""


def counting_token(request_id: int, position: int) -> int:
    """A token that is told apart from its neighbours and from other requests' tokens."""
    return 3 + (request_id * 7919 + position * 104729) % 30011


@dataclass(slots=True)
class _Queued:
    launch: Launch
    after: tuple[int, ...]


@dataclass(slots=True)
class _Running:
    launch: Launch
    work: Work
    started_s: float
    remaining_s: float
    slowdown: float = 1.0


@dataclass(slots=True)
class _SeatRecord:
    request_id: int
    tokens: int = 0


@dataclass
class SimulatedDevice:
    """`advance` moves it to a moment and returns the steps that ended by then, in the order of their ends."""

    truth: Truth
    num_layers: int
    token_of: TokenOf = counting_token
    now_s: float = 0.0
    _queues: dict[Lane, deque[_Queued]] = field(default_factory=lambda: {lane: deque() for lane in Lane})
    _running: dict[Lane, _Running] = field(default_factory=dict)
    _tails: dict[Lane, int] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)
    _seats: dict[int, _SeatRecord] = field(default_factory=dict)

    def start(self, launch: Launch) -> None:
        """Queue a step at the present moment."""
        for seat in launch.seats:
            self._seats[seat.seat] = _SeatRecord(seat.request_id)
        whole = launch.step.sms >= self.truth.total_sms
        lanes = tuple(Lane) if whole else (launch.lane,)
        after = tuple(self._tails[lane] for lane in lanes if lane in self._tails)
        for lane in lanes_of(launch.step):
            self._tails[lane] = launch.step_id
        self._open.add(launch.step_id)
        self._queues[launch.lane].append(_Queued(launch, after))
        self._begin_ready()

    def next_end_s(self) -> float | None:
        """When the next running step ends if nothing else starts; None when nothing runs."""
        ends = [self.now_s + r.remaining_s * r.slowdown for r in self._running.values()]
        return min(ends, default=None)

    def advance(self, now_s: float) -> list[StepDone]:
        """Move to `now_s`."""
        done: list[StepDone] = []
        while (end_s := self.next_end_s()) is not None and end_s <= now_s:
            self._progress(end_s)
            lane = min(self._running, key=lambda lane: (self._running[lane].remaining_s, lane))
            done.append(self._finish(lane))
            self._begin_ready()
        self._progress(now_s)
        return done

    def _progress(self, now_s: float) -> None:
        for running in self._running.values():
            running.remaining_s -= (now_s - self.now_s) / running.slowdown
        self.now_s = max(now_s, self.now_s)

    def _finish(self, lane: Lane) -> StepDone:
        running = self._running.pop(lane)
        self._open.discard(running.launch.step_id)
        self._slow_each_other()
        return StepDone(running.launch.step_id, self._draw(running.launch), running.started_s, self.now_s)

    def _begin_ready(self) -> None:
        for lane, queue in self._queues.items():
            if queue and lane not in self._running and not self._open.intersection(queue[0].after):
                launch = queue.popleft().launch
                work = self._work(launch)
                alone_s = self.truth.alone_s(work, launch.step.sms)
                self._running[lane] = _Running(launch, work, self.now_s, alone_s)
        self._slow_each_other()

    def _slow_each_other(self) -> None:
        running = list(self._running.values())
        for index, one in enumerate(running):
            others = running[:index] + running[index + 1 :]
            one.slowdown = max((self.truth.slowdown(one.work, o.work) for o in others), default=1.0)

    def _work(self, launch: Launch) -> Work:
        tokens = sum(part.end - part.start for part in launch.parts)
        earlier = sum((part.end - part.start) * part.start for part in launch.parts)
        context = sum(self._seats[row].tokens + 1 for row in launch.rows)
        share = 1.0
        if isinstance(launch.step, PrefillGroup):
            first, end = launch.step.layer_range
            share = (end - first) / self.num_layers
        return Work(tokens, earlier // max(tokens, 1), len(launch.rows), context, share)

    def _draw(self, launch: Launch) -> tuple[int, ...]:
        step = launch.step
        parts = launch.parts
        if isinstance(step, PrefillGroup) and step.layer_range[1] != self.num_layers:
            parts = ()
        drawn: list[int] = []
        for part in parts:
            self._seats[part.seat].tokens = part.end
            if part.samples:
                drawn.append(self.token_of(self._seats[part.seat].request_id, part.end))
        for row in launch.rows:
            seat = self._seats[row]
            seat.tokens += 1
            drawn.append(self.token_of(seat.request_id, seat.tokens))
        return tuple(drawn)
