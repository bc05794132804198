"""The queue on which a loop blocks, and the clock it reads, in real time.

Knows nothing about what is posted. Any thread posts; one thread waits.
"""

import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from bulletserve.core.events import Event


class MonotonicClock:
    """The system's monotonic clock: the same for every process of this machine."""

    def now_s(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()


class QueueInbox:
    """A thread-safe queue that is drained whole. `post` may be called from any thread and never blocks."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Event] = SimpleQueue()

    def post(self, event: Event) -> None:
        """Add an event."""
        self._queue.put(event)

    def wait(self, deadline_s: float) -> Sequence[Event]:
        """Everything posted so far; blocks until there is something or the deadline (monotonic) has passed."""
        events: list[Event] = []
        try:
            events.append(self._queue.get(timeout=max(0.0, deadline_s - time.monotonic())))
            while True:
                events.append(self._queue.get_nowait())
        except Empty:
            return events
