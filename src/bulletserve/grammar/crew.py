"""Threads that are given up when their work does not end.

Knows nothing about the work. A thread cannot be stopped from outside: one whose work takes longer than the limit is
left to itself, and another takes its place. Each that is left so keeps a core busy until its work ends after all, so
there is a most of them; while there are so many, nothing more is taken on.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

MOST_GIVEN_UP = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Order:
    work: Callable[[], None]
    overdue: Callable[[], None]
    refused: Callable[[], None]


class Crew:
    """`threads` daemon threads, begun with the first order. Work may take `limit_s`; for what takes longer its
    `overdue` is called, for what is not begun because too many are given up its `refused`. None of them raises."""

    def __init__(self, name: str, threads: int, limit_s: float) -> None:
        self._name, self._threads, self._limit_s = name, threads, limit_s
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._running: dict[threading.Thread, tuple[float, _Order]] = {}
        self._alive: set[threading.Thread] = set()
        self._given_up: set[threading.Thread] = set()
        self._begun = False

    @property
    def given_up(self) -> int:
        """Threads that are busy with work that nobody waits for any more."""
        return len(self._given_up)

    def submit(self, work: Callable[[], None], overdue: Callable[[], None], refused: Callable[[], None]) -> None:
        """Have `work` done as soon as a thread is free."""
        if self.given_up >= MOST_GIVEN_UP:
            refused()
            return
        self._orders.put(_Order(work, overdue, refused))
        if not self._begun:
            self._begun = True
            for _ in range(self._threads):
                self._hire()
            threading.Thread(target=self._watch, name=f"{self._name}-watch", daemon=True).start()

    def close(self, wait_s: float = 1.0) -> None:
        """End the threads; what is not begun is not done. Waits for those whose work ends within `wait_s`."""
        self._closed.set()
        with self._lock:
            alive = tuple(self._alive)
        for _ in alive:
            self._orders.put(None)
        until_s = time.monotonic() + wait_s
        for thread in alive:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _hire(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._alive.add(thread)
        thread.start()

    def _work(self) -> None:
        me = threading.current_thread()
        while (order := self._orders.get()) is not None and not self._closed.is_set():
            with self._lock:
                self._running[me] = time.monotonic(), order
            order.work()
            with self._lock:
                if self._running.pop(me, None) is None and not self._is_back(me):
                    return  # somebody has this place now

    def _is_back(self, me: threading.Thread) -> bool:
        """Whether there is a place for a thread whose work has ended after all."""
        self._given_up.discard(me)
        free = len(self._alive) < self._threads
        if free:
            self._alive.add(me)
        return free

    def _watch(self) -> None:
        while not self._closed.wait(self._limit_s / 4):
            for tell in self._overdue():
                tell()

    def _overdue(self) -> list[Callable[[], None]]:
        """Whom to tell that work is given up now; and, at the last, all that wait that they are refused."""
        since_s = time.monotonic() - self._limit_s
        found: list[Callable[[], None]] = []
        with self._lock:
            for thread, (began_s, order) in tuple(self._running.items()):
                if began_s > since_s:
                    continue
                del self._running[thread]
                self._alive.discard(thread)
                self._given_up.add(thread)
                found.append(order.overdue)
                if self.given_up < MOST_GIVEN_UP:
                    self._hire()
                _log.error(
                    "%s: work of over %g s is given up; %d threads are still busy with such",
                    *(self._name, self._limit_s, self.given_up),
                )
        while self.given_up >= MOST_GIVEN_UP and not self._orders.empty():
            if (order_or_end := self._orders.get()) is not None:
                found.append(order_or_end.refused)
        return found
