"""Keeps lanes of an executor busy from one thread, two steps deep, and says what the device's clock saw.

Knows nothing about schedulers. Each `Source` is one lane's work; whenever a step ends, the next one of its source is
started, as the loop does. A run warms up, recentres the sources, measures, then drains; only steps that were started
after the warm-up count, and only while all lanes were busy. How much the steps of the warm-up differ says how long to
measure: before contexts are recentred, because they grow with every step.

An executor that can be observed (a GPU's) gives events on the device's own clock; of any other (a CPU's) the times in
its `StepDone` count.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple, Protocol, cast

from bulletserve.core.events import StepDone
from bulletserve.core.launch import Launch
from bulletserve.core.partition import Lattice
from bulletserve.core.ports import Inbox
from bulletserve.core.snapshot import LANE_DEPTH
from bulletserve.profiling.meter import Meter, Watch
from bulletserve.profiling.sources import Source
from bulletserve.profiling.traces import (
    LaneFigures,
    StepTime,
    TooFewSteps,
    begins_prompt,
    common_window,
    figures,
    window_s,
)

WARM_S = 0.3
WAIT_S = 0.2
LONGEST_S = 30.0
"""A run that has not got its steps by then is given up."""


Task = Any
"""`engine.cuda.lane.GpuTask`, or `HostTask`: `launch`, and events `start` and `end`."""


class Device(Protocol):
    """What is driven: an executor."""

    @property
    def lattice(self) -> Lattice: ...

    def start(self, launch: Launch) -> None: ...


class Observable(Device, Protocol):
    """An executor whose steps can be watched: `engine.cuda.executor.CudaExecutor`."""

    before_step: Callable[[Launch], None] | None

    def observe(self, observer: Callable[[Task], None] | None) -> None: ...


class HostEvent(NamedTuple):
    """A moment on the host's clock, to be asked as a CUDA event is."""

    at_s: float

    def elapsed_time(self, other: "HostEvent") -> float:
        """Milliseconds until `other`."""
        return (other.at_s - self.at_s) * 1e3


class HostTask(NamedTuple):
    """A step of an executor that cannot be observed."""

    launch: Launch
    start: HostEvent
    end: HostEvent


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of each source in order, and the card's power and clock meanwhile. `start_us`: the host's time for each
    `executor.start` call."""

    lanes: tuple[LaneFigures, ...]
    watts: float
    mhz: float
    start_us: tuple[float, ...]


@dataclass(slots=True)
class _Lane:
    """A source and its ended steps, each with whether it was launched late; `begun` counts decode steps or prompts."""

    source: Source
    first_step: int = 0
    begun: int = 0
    tasks: list[tuple[Task, bool]] = field(default_factory=list)

    def repeats_ms(self) -> list[float]:
        """When its steps or whole prompts began, without the first half: clocks and caches were settling."""
        tasks = [task for task, _ in self.tasks]
        starts = [task.start for task in tasks if task.launch.rows or begins_prompt(task.launch)]
        later = starts[len(starts) // 2 :]
        return [later[0].elapsed_time(start) for start in later] if later else []


class Driver:
    """Drives `executor`, whose ends of steps arrive in `inbox`. One thread."""

    def __init__(
        self,
        executor: Device,
        inbox: Inbox,
        meter: Meter | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor, self._inbox, self._meter, self._now_s = executor, inbox, meter, now_s
        self._next_step = 0
        self._watched = cast(Observable, executor) if hasattr(executor, "observe") else None
        self._owner: dict[int, _Lane] = {}
        self._started: dict[int, Launch] = {}
        self._ended_s: dict[int, float] = {}
        self._launched_s: dict[int, float] = {}
        self._start_us: list[float] = []

    def run(
        self,
        *sources: Source,
        seconds: float = 1.0,
        shortest_s: float | None = None,
        least: int = 3,
        warm_s: float = WARM_S,
        on_step: Callable[[Source], None] | None = None,
    ) -> Run:
        """Run `sources` side by side, each on its lane, for `seconds` after a warm-up; with `shortest_s` for as long
        as their steps' spread wants (`traces.window_s`), between that and `seconds`.

        It goes on until every source has `least` whole decode steps or prompts. `on_step` hears of every step that
        ended, in this thread. Raises `TooFewSteps` if too few of them end, `RuntimeError` if one fails.
        """
        lanes = [_Lane(source) for source in sources]
        before = self._watched.before_step if self._watched is not None else None
        if self._watched is not None:
            self._watched.before_step = self._note_launch
            self._watched.observe(self._note_end)
        try:
            self._fill(lanes)
            warm_until_s = self._now_s() + warm_s
            self._turn_until(lambda: self._now_s() >= warm_until_s and all(lane.tasks for lane in lanes), on_step)
            if shortest_s is not None:
                seconds = max(window_s(lane.repeats_ms(), shortest_s, seconds) for lane in lanes)
            self._mark(lanes, seconds, warm_s)
            with Watch(self._meter) as power:
                until_s = self._now_s() + seconds
                self._turn_until(
                    lambda: self._now_s() >= until_s and all(lane.begun > least for lane in lanes), on_step
                )
            self._drain()
        finally:
            if self._watched is not None:
                self._watched.observe(None)
                self._watched.before_step = before
        steps = [self._steps(lane, lanes[0].tasks[0][0]) for lane in lanes]
        window = common_window(steps)
        start_us, self._start_us = tuple(self._start_us), []
        self._ended_s.clear()
        self._launched_s.clear()
        return Run(tuple(figures(each, window) for each in steps), power.watts, power.mhz, start_us)

    # --- steps ------------------------------------------------------------------------------------------------

    def _fill(self, lanes: Sequence[_Lane]) -> None:
        for lane in lanes:
            for _ in range(LANE_DEPTH):
                self._start(lane)

    def _start(self, lane: _Lane) -> None:
        launch = lane.source.next(self._next_step)
        self._owner[launch.step_id] = lane
        self._started[launch.step_id] = launch
        self._next_step += 1
        began_ns = time.perf_counter_ns()
        self._executor.start(launch)
        self._start_us.append((time.perf_counter_ns() - began_ns) / 1e3)

    def _turn_until(self, over: Callable[[], bool], on_step: Callable[[Source], None] | None) -> None:
        given_up_s = self._now_s() + LONGEST_S
        while not over():
            for lane in self._ended():
                self._start(lane)
                if on_step is not None:
                    on_step(lane.source)
            if self._now_s() > given_up_s:
                self._drain()
                raise TooFewSteps(f"too few steps ended in {LONGEST_S:.0f} s")

    def _drain(self) -> None:
        given_up_s = self._now_s() + LONGEST_S
        while self._owner:
            self._ended()
            if self._now_s() > given_up_s:
                raise RuntimeError(f"{len(self._owner)} steps do not end")

    def _ended(self) -> list[_Lane]:
        """The lanes of the steps that have ended since; waits for the first."""
        lanes: list[_Lane] = []
        failed = ""
        for event in self._inbox.wait(self._now_s() + WAIT_S):
            if isinstance(event, StepDone) and event.step_id in self._owner:
                launch = self._started.pop(event.step_id)
                if self._watched is None and not event.error:
                    self._note_end(HostTask(launch, HostEvent(event.started_s), HostEvent(event.finished_s)))
                lanes.append(self._owner.pop(event.step_id))
                failed = failed or event.error
        if failed:
            self._drain()
            raise RuntimeError(failed)
        return lanes

    def _mark(self, lanes: Sequence[_Lane], seconds: float, warm_s: float) -> None:
        """What is started from now on counts."""
        self._start_us.clear()
        for lane in lanes:
            expected = len(lane.tasks) / warm_s * seconds if warm_s > 0 else 0.0
            lane.source.recentre(round(expected))
            # The step that takes the seats anew carries all their blocks: it and its successor are not typical.
            lane.first_step = self._next_step + 2 * LANE_DEPTH * len(lanes)
            lane.begun = 0

    # --- what was seen, in the lanes' threads -----------------------------------------------------------------

    def _note_launch(self, launch: Launch) -> None:
        self._launched_s[launch.step_id] = time.monotonic()

    def _note_end(self, task: Task) -> None:
        step_id = task.launch.step_id
        lane = self._owner.get(step_id)
        if lane is None:
            return  # of a run that was given up
        self._ended_s[step_id] = time.monotonic()
        lane.begun += step_id >= lane.first_step and (bool(task.launch.rows) or begins_prompt(task.launch))
        late = False
        if lane.tasks:
            before = lane.tasks[-1][0].launch.step_id
            late = self._launched_s.get(step_id, 0.0) > self._ended_s[before]
        lane.tasks.append((task, late))

    def _steps(self, lane: _Lane, origin: Task) -> list[StepTime]:
        """The measured steps of a lane on the device's clock, in ms since `origin` began."""
        steps: list[StepTime] = []
        for (before, _), (task, late) in zip(lane.tasks, lane.tasks[1:], strict=False):
            if task.launch.step_id < lane.first_step:
                continue
            start_ms = origin.start.elapsed_time(task.start)
            end_ms = start_ms + task.start.elapsed_time(task.end)
            steps.append(StepTime(task.launch, start_ms, end_ms, before.end.elapsed_time(task.start), late))
        if not steps or not isfinite(steps[-1].end_ms):
            raise TooFewSteps("no step was measured")
        return steps
