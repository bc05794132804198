"""Python's garbage collector during work that is timed. Knows nothing about the work."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
    """Nothing is collected meanwhile: for minutes that keep all they make, as a measured run does its answers. Looking
    through those stops every thread for 50 to 100 ms."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
