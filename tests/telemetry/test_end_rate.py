"""How long a queue is said to take, against queues whose end is known."""

from collections import deque
from math import isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.telemetry.end_rate import LEAST_ENDS, PERIOD_S, EndRate


def serve(rate: EndRate, seats: int, answer_s: float, until_s: float, *, together: bool, queue: int = 1000) -> None:
    """A queue that stays full in front of `seats`, each of which serves a request in `answer_s`."""
    rate.waiting(queue, 0.0)
    offsets = [0.0 if together else answer_s * seat / seats for seat in range(seats)]
    ends = deque(sorted(offset + (0.0 if offset else answer_s) for offset in offsets))
    while ends[0] <= until_s:
        now_s = ends.popleft()
        rate.ended(seats - 1, now_s)
        rate.waiting(queue, now_s)
        ends.append(now_s + answer_s)


@given(
    seats=st.integers(LEAST_ENDS, 300),
    answer_s=st.floats(0.5, 60.0),
    generations=st.floats(2.0, 30.0),
    together=st.booleans(),
    waiting=st.integers(1, 2000),
)
@settings(deadline=None)
def test_a_queue_takes_as_long_as_its_seats_need(
    seats: int, answer_s: float, generations: float, together: bool, waiting: int
) -> None:
    rate, now_s = EndRate(), answer_s * generations
    serve(rate, seats, answer_s, now_s, together=together)
    true_s = waiting * answer_s / seats
    assert 0.45 * true_s < rate.wait_s(waiting, seats, now_s, 0.05 * true_s) < 2.2 * true_s


def test_a_prompt_forecast_is_gone_by_only_until_a_generation_has_ended() -> None:
    rate = EndRate()
    assert rate.wait_s(1000, 0, 0.0, 5.0) == 5.0
    serve(rate, 100, 20.0, 2.0, together=False)
    assert rate.wait_s(1000, 100, 2.0, 5.0) == 5.0
    assert rate.wait_s(1000, 100, 8.0, 5.0) == 8.0, "that long they have waited already"
    serve(rate := EndRate(), 100, 20.0, 60.0, together=False)
    assert rate.wait_s(1000, 100, 60.0, 5.0) == pytest.approx(200.0, rel=0.05)


def test_ends_while_nobody_waits_say_nothing() -> None:
    rate = EndRate()
    for second in range(1000):
        rate.ended(0, float(second))
    assert rate.wait_s(1000, 0, 1000.0, 5.0) == 5.0


def test_a_later_queue_begins_with_what_an_earlier_one_knew() -> None:
    rate = EndRate()
    serve(rate, 20, 10.0, 100.0, together=False)
    rate.waiting(0, 100.0)
    rate.waiting(1000, 5000.0)
    assert rate.wait_s(1000, 20, 5000.0, 5.0) == pytest.approx(500.0, rel=0.1)


def test_a_server_that_has_become_quicker_is_followed() -> None:
    rate = EndRate()
    serve(rate, 20, 20.0, 1000.0, together=False)
    assert rate.wait_s(100, 20, 1000.0, 0.0) == pytest.approx(100.0, rel=0.1)
    for end in range(int(5 * PERIOD_S * 10)):
        rate.ended(20, 1000.0 + end / 10)
    assert rate.wait_s(100, 20, 1000.0 + 5 * PERIOD_S, 0.0) == pytest.approx(10.0, rel=0.1)


@given(ends=st.integers(0, 3 * LEAST_ENDS), stalled_s=st.floats(1.0, 1e9), forecast_s=st.floats(0.0, 1e18))
@settings(deadline=None)
def test_while_nothing_ends_the_wait_grows_and_stays_finite(ends: int, stalled_s: float, forecast_s: float) -> None:
    rate = EndRate()
    rate.waiting(50, 0.0)
    for end in range(ends):
        rate.ended(4, 0.1 * (end + 1))
    soon, later = (rate.wait_s(50, 4, 10.0 + stall_s, forecast_s) for stall_s in (stalled_s, 2 * stalled_s))
    assert isfinite(later) and soon <= later and later >= stalled_s


def test_ends_at_the_very_moment_are_no_rate() -> None:
    rate = EndRate()
    rate.waiting(5, 7.0)
    for _ in range(LEAST_ENDS):
        rate.ended(0, 7.0)
    assert rate.wait_s(5, 0, 7.0, 3.0) == 3.0
