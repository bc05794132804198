"""Whether the garbage collector looks, and when again."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from bulletserve.core.garbage import IDLE_S, YOUNG_S, Collection, frozen_garbage, kept_garbage


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
    allowed, thresholds = gc.isenabled(), gc.get_threshold()
    with pytest.raises(ZeroDivisionError), around():
        _ = 1 / 0
    assert (gc.isenabled(), gc.get_threshold()) == (allowed, thresholds)


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


def generations_looked_at(work: Callable[[], None]) -> list[int]:
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        work()
    finally:
        gc.callbacks.remove(note)
    return seen


def test_what_is_young_is_collected_by_the_clock_and_what_is_old_is_not_looked_at() -> None:
    collection = Collection()
    kept: list[list[int]] = []
    gone: list[weakref.ref[Knot]] = []

    def work() -> None:
        for turn in range(200):
            kept.extend([number] for number in range(1000))
            gone.append(a_knot())
            collection.told(turn * 0.01, idle=False)

    with kept_garbage():
        assert generations_looked_at(work) == [0] * 8, "two seconds"
        late = [number for number, knot in enumerate(gone) if knot() is not None]
        assert YOUNG_S == 2.0 / 8 and late == list(range(176, 200)), "made after the last look"


def test_everything_is_looked_at_once_in_each_idle_time() -> None:
    collection = Collection()

    def looks(now_s: float, *, idle: bool) -> bool:
        return 2 in generations_looked_at(lambda: collection.told(now_s, idle=idle))

    with frozen_garbage(), kept_garbage():
        assert not looks(0.0, idle=False)
        assert not looks(0.1, idle=True), "the next request may be on its way"
        assert not looks(0.1 + 0.9 * IDLE_S, idle=True)
        assert looks(0.1 + 1.1 * IDLE_S, idle=True)
        assert not looks(9.0, idle=True), "nothing has been made since"
        assert not looks(9.1, idle=False)
        assert not looks(9.2, idle=True)
        assert looks(9.3 + IDLE_S, idle=True)


def test_what_was_alive_in_one_idle_time_is_collected_in_the_next_one_after_its_end() -> None:
    collection = Collection()
    knot = Knot()
    ended = weakref.ref(knot)
    with kept_garbage():
        for now_s in (0.0, 1.1 * IDLE_S):
            collection.told(now_s, idle=True)
        del knot
        collection.told(2.0 * IDLE_S, idle=False)
        for now_s in (3.0 * IDLE_S, 4.1 * IDLE_S):
            collection.told(now_s, idle=True)
        assert ended() is None
