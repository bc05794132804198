"""Python's garbage collector during work that is timed. Knows nothing about the work."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Nothing that is there now is looked at by the collector meanwhile; what is made meanwhile is, then and after."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
