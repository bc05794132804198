"""A device made of arithmetic: two lanes that carry steps, at the speed that a truth gives them.

Knows nothing about threads or real time: somebody else moves its clock. It keeps the one rule of order of the real
engine (docs/decisions/0001): steps on a lane run in order; a step that asks for all SMs waits for everything started
before it. A step's progress is a share of the whole: while both lanes run, each goes at the speed of that pair, and
when a neighbour starts or ends, what is left goes on at the new speed. The clock comes down to what the power cap
allows with a lag (`clock_lag`). A step cannot begin before the host has launched
it, and each lane's host launches one step after the other.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bulletserve.core.events import StepDone
from bulletserve.core.launch import Launch
from bulletserve.core.operators import StepShape
from bulletserve.core.plan import Lane, PrefillGroup, lanes_of
from bulletserve.simulator.clock_lag import ClockLag
from bulletserve.simulator.truth import Pace, Truth

TokenOf = Callable[[int, int], int]
"""(request id, number of tokens before it) -> token id."""


def counting_token(request_id: int, position: int) -> int:
    """A token that is told apart from its neighbours and from other requests' tokens."""
    return 3 + (request_id * 7919 + position * 104729) % 30011


@dataclass(slots=True)
class _Queued:
    launch: Launch
    after: tuple[int, ...]
    launched_s: float


@dataclass(slots=True)
class _Running:
    """`left`: the share of it that is still to do; `seconds`: what all of it would take as things are now."""

    launch: Launch
    shape: StepShape
    started_s: float
    left: float = 1.0
    seconds: float = 0.0


@dataclass(slots=True)
class _SeatRecord:
    request_id: int
    tokens: int = 0


@dataclass
class SimulatedDevice:
    """`advance` moves it to a moment and returns the steps that ended by then, in the order of their ends.

    `host_s`: from a step's start by the loop to the earliest moment at which the device may begin it. `token_of` None:
    every token is 0, which costs nothing.
    """

    truth: Truth
    num_layers: int
    token_of: TokenOf | None = counting_token
    host_s: float = 0.0
    now_s: float = 0.0
    _queues: dict[Lane, deque[_Queued]] = field(default_factory=lambda: {lane: deque() for lane in Lane})
    _running: dict[Lane, _Running] = field(default_factory=dict)
    _tails: dict[Lane, int] = field(default_factory=dict)
    _hosts_free_s: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))
    _open: set[int] = field(default_factory=set)
    _asked_w: float | None = None
    _seats: dict[int, _SeatRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._clock = ClockLag(self.truth.idle_w, self.truth.power_cap_w)

    def start(self, launch: Launch) -> None:
        """Queue a step at the present moment."""
        for seat in launch.seats:
            self._seats[seat.seat] = _SeatRecord(seat.request_id)
        whole = launch.step.sms >= self.truth.total_sms
        lanes = tuple(Lane) if whole else (launch.lane,)
        after = tuple(self._tails[lane] for lane in lanes if lane in self._tails)
        for lane in lanes_of(launch.step):
            self._tails[lane] = launch.step_id
        launched_s = max(self.now_s, self._hosts_free_s[launch.lane]) + self.host_s
        self._hosts_free_s[launch.lane] = launched_s
        self._open.add(launch.step_id)
        self._queues[launch.lane].append(_Queued(launch, after, launched_s))
        self._begin_ready()

    def next_change_s(self) -> float | None:
        """When the next step ends or begins if nothing else is started; None when nothing will happen."""
        moments = [self.now_s + one.left * one.seconds for one in self._running.values()]
        moments += [
            queue[0].launched_s for lane, queue in self._queues.items() if self._waits_for_host_only(lane, queue)
        ]
        return min(moments, default=None)

    def advance(self, now_s: float) -> list[StepDone]:
        """Move to `now_s`. Steps that end at the same moment end in the order in which they were started."""
        done: list[StepDone] = []
        while (moment_s := self.next_change_s()) is not None and moment_s <= now_s:
            self._progress(moment_s)
            ended = [lane for lane, one in self._running.items() if one.left <= 0.0 or self._ends_s(one) <= moment_s]
            done += [self._finish(lane) for lane in sorted(ended, key=lambda at: self._running[at].launch.step_id)]
            self._begin_ready()
        self._progress(now_s)
        return done

    def _ends_s(self, one: _Running) -> float:
        return self.now_s + one.left * one.seconds

    def _waits_for_host_only(self, lane: Lane, queue: deque[_Queued]) -> bool:
        return bool(queue) and lane not in self._running and self._open.isdisjoint(queue[0].after)

    def _progress(self, now_s: float) -> None:
        if now_s > self.now_s:
            for one in self._running.values():
                one.left -= (now_s - self.now_s) / one.seconds
            self._clock.passed(now_s - self.now_s, self._asked_w)
            self.now_s = now_s

    def _finish(self, lane: Lane) -> StepDone:
        one = self._running.pop(lane)
        self._open.discard(one.launch.step_id)
        self._set_speeds()
        return StepDone(one.launch.step_id, self._draw(one.launch), one.started_s, self.now_s)

    def _begin_ready(self) -> None:
        begun = False
        for lane, queue in self._queues.items():
            if self._waits_for_host_only(lane, queue) and queue[0].launched_s <= self.now_s:
                launch = queue.popleft().launch
                self._running[lane] = _Running(launch, self._shape(launch), self.now_s)
                begun = True
        if begun:
            self._set_speeds()

    def _set_speeds(self) -> None:
        running = tuple(self._running.values())
        self._asked_w = None
        if len(running) == 1:
            self._set_speed(running[0], self.truth.alone(running[0].shape, running[0].launch.step.sms))
        elif running:
            for one, other in (running, running[::-1]):
                sms, other_sms = one.launch.step.sms, other.launch.step.sms
                self._set_speed(one, self.truth.beside(one.shape, sms, other.shape, other_sms))

    def _set_speed(self, one: _Running, pace: Pace) -> None:
        one.seconds = self._clock.seconds(pace, one.left)
        self._asked_w = pace.asked_w

    def _shape(self, launch: Launch) -> StepShape:
        layers, last = self.num_layers, True
        if isinstance(launch.step, PrefillGroup):
            first, end = launch.step.layer_range
            layers, last = end - first, end == self.num_layers
        tokens = pairs = read = sampled = 0
        for _, start, end, samples in launch.parts:
            new = end - start
            tokens += new
            pairs += new * start + new * (new + 1) // 2
            read += end
            sampled += samples and last
        rows = len(launch.rows)
        context = sum([self._seats[row].tokens for row in launch.rows]) + rows
        return StepShape(tokens, pairs, read, rows, context, layers, rows + sampled)

    def _draw(self, launch: Launch) -> tuple[int, ...]:
        step, parts, seats = launch.step, launch.parts, self._seats
        if isinstance(step, PrefillGroup) and step.layer_range[1] != self.num_layers:
            parts = ()
        for part in parts:
            seats[part.seat].tokens = part.end
        for row in launch.rows:
            seats[row].tokens += 1
        drawing = [part.seat for part in parts if part.samples]
        if self.token_of is None:
            return (0,) * (len(drawing) + len(launch.rows))
        records = [seats[seat] for seat in (*drawing, *launch.rows)]
        return tuple([self.token_of(record.request_id, record.tokens) for record in records])
