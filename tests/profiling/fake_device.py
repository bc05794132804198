"""A device with two lanes on a made-up clock: executor and inbox of a driver."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from bulletserve.core.events import Event, StepDone
from bulletserve.core.launch import Launch
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import Lane, MixedStep, PrefillGroup

DECODE_MS, GROUP_MS, MIXED_MS, GAP_MS = 5.0, 8.0, 20.0, 0.25
SLOWER_TOGETHER = 1.5


@dataclass
class FakeEvent:
    at_ms: float

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at_ms - self.at_ms


@dataclass
class FakeTask:
    launch: Launch
    start: FakeEvent
    end: FakeEvent


class FakeDevice:
    """A step begins `GAP_MS` after its lane's last one and takes longer while the other lane has work."""

    lattice = Lattice.of_splits(132, (Partition(100, 32), Partition(68, 64)))

    def __init__(self, fail_at: int = -1) -> None:
        self.before_step: Callable[[Launch], None] | None = None
        self.now_ms = 0.0
        self.launches: list[Launch] = []
        self.most_queued = 0
        self._observer: Callable[[Any], None] | None = None
        self._free_ms = dict.fromkeys(Lane, 0.0)
        self._queued = dict.fromkeys(Lane, 0)
        self._ends: list[tuple[float, int, FakeTask]] = []
        self._fail_at = fail_at

    def now_s(self) -> float:
        return self.now_ms / 1e3

    def observe(self, observer: Callable[[Any], None] | None) -> None:
        self._observer = observer

    def start(self, launch: Launch) -> None:
        if self.before_step is not None:
            self.before_step(launch)
        self.launches.append(launch)
        lane = launch.lane
        other = Lane.DECODE if lane is Lane.PREFILL else Lane.PREFILL
        took_ms = self.took_ms(launch) * (SLOWER_TOGETHER if self._queued[other] else 1.0)
        start_ms = max(self.now_ms, self._free_ms[lane] + GAP_MS)
        self._free_ms[lane] = start_ms + took_ms
        self._queued[lane] += 1
        self.most_queued = max(self.most_queued, self._queued[lane])
        task = FakeTask(launch, FakeEvent(start_ms), FakeEvent(start_ms + took_ms))
        heappush(self._ends, (start_ms + took_ms, launch.step_id, task))

    def took_ms(self, launch: Launch) -> float:
        """Of a step alone."""
        return {PrefillGroup: GROUP_MS, MixedStep: MIXED_MS}.get(type(launch.step), DECODE_MS)

    def wait(self, deadline_s: float) -> Sequence[Event]:
        if not self._ends or self._ends[0][0] > deadline_s * 1e3:
            self.now_ms = max(self.now_ms, deadline_s * 1e3)
            return ()
        self.now_ms, step_id, task = heappop(self._ends)
        self._queued[task.launch.lane] -= 1
        if step_id == self._fail_at:
            return (StepDone(step_id, (), 0.0, 0.0, "broken"),)
        if self._observer is not None:
            self._observer(task)
        return (StepDone(step_id, (), task.start.at_ms / 1e3, task.end.at_ms / 1e3),)


class UnwatchedDevice:
    """The same device, which cannot be observed: only its `StepDone` says when steps ran, as on a CPU."""

    def __init__(self) -> None:
        self._device = FakeDevice()
        self.lattice = self._device.lattice
        self.now_s, self.start, self.wait = self._device.now_s, self._device.start, self._device.wait
