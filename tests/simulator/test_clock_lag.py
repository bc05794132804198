"""The clock follows the power of a while: light before heavy runs at the top, heavy for long at the steady clock."""

from math import exp, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulletserve.simulator.clock_lag import MEMORY_S, ClockLag
from bulletserve.simulator.truth import Pace

HEAVY = Pace(steady_s=0.014, top_s=0.0115, asked_w=1000.0)


def lag(mean_w: float) -> ClockLag:
    """A card of 700 W whose mean is `mean_w`."""
    return ClockLag(mean_w, 700.0)


def test_a_heavy_step_after_a_light_while_has_the_highest_clock() -> None:
    assert lag(200.0).seconds(HEAVY, 1.0) == HEAVY.top_s


def test_a_heavy_step_after_heavy_ones_has_the_steady_clock() -> None:
    assert lag(1000.0).seconds(HEAVY, 1.0) == HEAVY.steady_s
    card = lag(200.0)
    card.passed(1.0, 1000.0)
    assert card.seconds(HEAVY, 1.0) == pytest.approx(HEAVY.steady_s)


def test_light_time_brings_the_clock_back() -> None:
    card = lag(1000.0)
    card.passed(0.2, None)
    assert card.seconds(HEAVY, 1.0) == pytest.approx(HEAVY.steady_s)  # the idle power of this card is 1000 W
    card = ClockLag(200.0, 700.0)
    card.passed(1.0, 1000.0)
    card.passed(MEMORY_S, 500.0)
    assert HEAVY.top_s < card.seconds(HEAVY, 1.0) < HEAVY.steady_s
    card.passed(0.5, None)
    assert card.seconds(HEAVY, 1.0) == HEAVY.top_s


def test_below_the_cap_and_without_one_nothing_lags() -> None:
    light = Pace(0.005, 0.005, 600.0)
    assert lag(1000.0).seconds(light, 1.0) == 0.005
    assert ClockLag(200.0, inf).seconds(HEAVY, 1.0) == HEAVY.steady_s


@given(mean_w=st.floats(100, 1500), left=st.floats(0.001, 1.0), asked_w=st.floats(701, 1500))
def test_the_mean_speed_is_that_of_small_pieces(mean_w: float, left: float, asked_w: float) -> None:
    pace, pieces = HEAVY._replace(asked_w=asked_w), 2000
    lasts_s = left * pace.steady_s
    way = 0.0
    for piece in range(pieces):
        at_s = lasts_s * (piece + 0.5) / pieces
        now_w = asked_w + (mean_w - asked_w) * exp(-at_s / MEMORY_S)
        way += 1.0 if mean_w >= asked_w else max(0.0, (now_w - 700.0) / (asked_w - 700.0))
    expected_s = pace.top_s + (pace.steady_s - pace.top_s) * way / pieces
    assert lag(mean_w).seconds(pace, left) == pytest.approx(expected_s, rel=1e-4)


@given(parts=st.lists(st.floats(0.0, 0.1), max_size=8), asked_w=st.floats(0, 1500))
def test_stops_on_the_way_change_nothing(parts: list[float], asked_w: float) -> None:
    whole, cut = lag(300.0), lag(300.0)
    whole.passed(sum(parts), asked_w)
    for part in parts:
        cut.passed(part, asked_w)
    assert cut.seconds(HEAVY, 1.0) == pytest.approx(whole.seconds(HEAVY, 1.0), rel=1e-6)
