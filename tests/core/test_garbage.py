"""Whether the garbage collector looks, and when again."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from bulletserve.core.garbage import frozen_garbage, kept_garbage


class Knot:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.me = self


def a_knot() -> "weakref.ref[Knot]":
    return weakref.ref(Knot())


def test_kept_garbage_is_kept_until_the_end_and_the_collector_is_as_it_was() -> None:
    before, allowed = a_knot(), gc.isenabled()
    with kept_garbage():
        assert before() is None, "what was garbage before is gone"
        knot = a_knot()
        made = [[number] for number in range(100_000)]  # would have the collector look many times
        assert knot() is not None and len(made) == 100_000
        assert not gc.isenabled()
    assert gc.isenabled() == allowed
    gc.disable()
    try:
        with kept_garbage():
            pass
        assert not gc.isenabled()
    finally:
        if allowed:
            gc.enable()


@pytest.mark.parametrize("around", [kept_garbage, frozen_garbage])
def test_an_error_leaves_the_collector_as_it_was(around: Callable[[], AbstractContextManager[None]]) -> None:
    allowed = gc.isenabled()
    with pytest.raises(ZeroDivisionError), around():
        _ = 1 / 0
    assert gc.isenabled() == allowed


NESTED = """
import gc
from bulletserve.core.garbage import frozen_garbage
with frozen_garbage():
    outer = gc.get_freeze_count()
    assert outer > 1000, outer
    made = [[number] for number in range(100)]
    try:
        with frozen_garbage():
            assert gc.get_freeze_count() >= outer + 100, "the inner holds what was made since"
            1 / 0
    except ZeroDivisionError:
        assert gc.get_freeze_count() >= outer, "the outer goes on"
assert gc.get_freeze_count() == 0
"""


def test_what_is_frozen_stays_so_until_the_outermost_ends() -> None:
    """In a process of its own: a server of another test may have this one's frozen."""
    done = subprocess.run([sys.executable, "-c", NESTED], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
