"""A lane's thread: runs what is queued, in order, each once the steps it comes after have ended.

Knows nothing about what the work is. Work that raises does not end the thread: the caller's function deals with it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue


@dataclass(slots=True)
class Task:
    """Something to run after others. `ended` is set whatever became of it."""

    run: Callable[[], None]
    after: Sequence["Task"] = ()
    ended: threading.Event = field(default_factory=threading.Event)


class LaneThread:
    """One daemon thread with a queue of tasks."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Task) -> None:
        """Queue a task; never blocks."""
        self._queue.put(task)

    def close(self) -> None:
        """Drop what is queued and wait for the task that runs."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            for earlier in task.after:
                earlier.ended.wait()
            task.after = ()  # else every task would keep all that ever ran alive
            if not self._closed:
                task.run()
            task.ended.set()
