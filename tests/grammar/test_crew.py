"""Threads that are given up: nobody behind endless work waits for it, and there is an end to replacing them."""

import logging
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from bulletserve.grammar.crew import MOST_GIVEN_UP, Crew

LIMIT_S = 0.2


def wrong() -> None:
    """What must not be called."""
    raise AssertionError("called for nothing")


@pytest.fixture
def end() -> Iterator[threading.Event]:
    """What endless work waits for, so that the tests' process is rid of it."""
    event = threading.Event()
    yield event
    event.set()


def test_who_waits_behind_endless_work_is_served_and_it_is_answered_itself(end: threading.Event) -> None:
    crew, said = Crew("test", 1, LIMIT_S), SimpleQueue[str]()
    crew.submit(lambda: end.wait() and None, lambda: said.put("given up"), wrong)
    crew.submit(lambda: said.put("done"), wrong, wrong)
    assert [said.get(timeout=20), said.get(timeout=20)] in (["given up", "done"], ["done", "given up"])
    assert crew.given_up == 1
    end.set()
    crew.submit(lambda: said.put("again"), wrong, wrong)
    assert said.get(timeout=20) == "again"
    crew.close()
    assert said.empty(), "what ends late after all is not told twice"


def test_while_too_many_are_given_up_nothing_waits_and_afterwards_all_is_as_before(
    end: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    crew, said = Crew("test", 2, LIMIT_S), SimpleQueue[str]()
    with caplog.at_level(logging.ERROR):
        for _ in range(MOST_GIVEN_UP + 3):
            crew.submit(lambda: end.wait() and None, lambda: said.put("given up"), lambda: said.put("refused"))
        found = [said.get(timeout=30) for _ in range(MOST_GIVEN_UP + 3)]
    assert set(found) == {"given up", "refused"}
    assert crew.given_up == found.count("given up") in (MOST_GIVEN_UP, MOST_GIVEN_UP + 1)
    crew.submit(wrong, wrong, lambda: said.put("refused"))
    assert said.get(timeout=1) == "refused"
    assert "given up" in caplog.text
    end.set()
    until_s = time.monotonic() + 20
    while crew.given_up and time.monotonic() < until_s:
        time.sleep(0.01)
    both = threading.Barrier(3)
    for _ in range(2):
        crew.submit(lambda: both.wait(20) and None, wrong, wrong)
    both.wait(20)  # both places are taken again
    crew.close()
    assert sum(thread.name == "test" for thread in threading.enumerate()) == 0


def test_closing_ends_idle_threads_and_waits_for_nobody_for_ever(end: threading.Event) -> None:
    crew, begun = Crew("test-close", 2, 60.0), threading.Event()

    def endless() -> None:
        begun.set()
        end.wait()

    crew.submit(endless, wrong, wrong)
    assert begun.wait(20)
    since_s = time.monotonic()
    crew.close(wait_s=0.1)
    assert time.monotonic() - since_s < 10
    end.set()
    until_s = time.monotonic() + 20
    while any(thread.name == "test-close" for thread in threading.enumerate()) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not any(thread.name == "test-close" for thread in threading.enumerate())
    Crew("never begun", 1, 1.0).close()
