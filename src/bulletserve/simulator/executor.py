"""The simulated device behind the executor's port, in virtual time and in real time.

Knows nothing about the scheduler. `VirtualExecutor` is clock, inbox and executor in one: waiting moves the clock to
the next event. `RealtimeExecutor` lets the wall clock move the device, for the server's end-to-end tests.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import count

from bulletserve.core.events import Event
from bulletserve.core.launch import Launch
from bulletserve.core.partition import Lattice
from bulletserve.core.ports import Poster
from bulletserve.simulator.device import SimulatedDevice


class VirtualExecutor:
    """Discrete-event time. Simultaneous events come in the order: steps that ended, then what was posted."""

    def __init__(self, device: SimulatedDevice, lattice: Lattice, agenda: Iterable[tuple[float, Event]] = ()) -> None:
        self._device = device
        self.lattice = lattice
        self._order = count()
        self._agenda: list[tuple[float, int, Event]] = []
        for at_s, event in agenda:
            self.schedule(at_s, event)

    @property
    def has_work(self) -> bool:
        """Whether anything will still happen by itself."""
        return bool(self._agenda) or self._device.next_change_s() is not None

    def schedule(self, at_s: float, event: Event) -> None:
        """Let an event happen at a moment."""
        heappush(self._agenda, (at_s, next(self._order), event))

    def post(self, event: Event) -> None:
        """Let an event happen now."""
        self.schedule(self._device.now_s, event)

    def now_s(self) -> float:
        """Virtual seconds."""
        return self._device.now_s

    def wait(self, deadline_s: float) -> Sequence[Event]:
        """Move to the next event or the deadline; a step that begins is no event."""
        while True:
            moments = [deadline_s, self._device.next_change_s(), self._agenda[0][0] if self._agenda else None]
            now_s = max(min(m for m in moments if m is not None), self._device.now_s)
            events: list[Event] = list(self._device.advance(now_s))
            while self._agenda and self._agenda[0][0] <= now_s:
                events.append(heappop(self._agenda)[2])
            if events or now_s >= deadline_s:
                return events

    def start(self, launch: Launch) -> None:
        """Queue a step."""
        self._device.start(launch)

    def close(self) -> None:
        """Nothing to release."""


class RealtimeExecutor:
    """The device moved by the wall clock, on a thread of its own."""

    def __init__(self, device: SimulatedDevice, lattice: Lattice, poster: Poster) -> None:
        self._device = device
        self.lattice = lattice
        self._poster = poster
        self._device.now_s = time.monotonic()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="simulated-device", daemon=True)
        self._thread.start()

    def start(self, launch: Launch) -> None:
        """Queue a step."""
        with self._changed:
            self._move()
            self._device.start(launch)
            self._changed.notify()

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _move(self) -> None:
        for done in self._device.advance(time.monotonic()):
            self._poster.post(done)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                self._move()
                change_s = self._device.next_change_s()
                self._changed.wait(None if change_s is None else max(0.0, change_s - time.monotonic()))
