"""Python's garbage collector during work that is timed. Knows nothing about the work.

It stops every thread while it looks: a fraction of a millisecond for what is young, 50 to 200 ms for all that a busy
engine or a client of thousands of requests remembers.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_S = 0.25
"""How often what is young is looked through: of a busy engine a thousand objects, in some tenths of a millisecond."""

IDLE_S = 1.0
"""After so long without work there is time to look through everything."""

_freezing = threading.Lock()
_frozen = 0


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Nothing that is there now is looked at by the collector meanwhile; what is made meanwhile is, then and after.

    The collector has one freezer for all threads: where one such time lies in another, all is let go with the last.
    """
    global _frozen
    gc.collect()
    with _freezing:
        gc.freeze()
        _frozen += 1
    try:
        yield
    finally:
        with _freezing:
            _frozen -= 1
            if not _frozen:
                gc.unfreeze()


@contextmanager
def kept_garbage() -> Iterator[None]:
    """Nothing is collected meanwhile: for minutes that keep all they make, as a measured run does its answers."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Collection:
    """Collects within `kept_garbage`, by the clock: what is young now and then, the rest once in each idle time, but
    for what `frozen_garbage` holds. What is alive in an idle time is not frozen: it may be garbage in the next one.

    Python goes by how many more objects were made than freed. Where old ones are freed as fast as new ones are made, it
    lets tens of thousands gather before it looks at them as young, in one go of up to 40 ms. What lies in a cycle,
    outlives `YOUNG_S` and is garbage then stays until the next idle time: for work that makes no such garbage.
    """

    def __init__(self) -> None:
        self._young_s = 0.0
        self._idle_from_s: float | None = None
        self._looked = False

    def told(self, now_s: float, *, idle: bool) -> None:
        """What there is to do now; to be told often, by one thread."""
        if not idle:
            self._idle_from_s, self._looked = None, False
            if now_s >= self._young_s:
                self._young_s = now_s + YOUNG_S
                gc.collect(0)
        elif self._idle_from_s is None:
            self._idle_from_s = now_s
        elif not self._looked and now_s - self._idle_from_s >= IDLE_S:
            self._looked = True
            gc.collect()
