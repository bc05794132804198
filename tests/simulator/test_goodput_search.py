"""A search ends beside the edge, in few runs, and runs nothing twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.simulator.goodput_search import LOWEST_RATE, place_of, rate_at, search
from bulletserve.telemetry.goodput import Met, goodput


@given(edge=st.floats(0.02, 5000.0), first=st.floats(0.05, 4000.0))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_a_search_ends_beside_the_edge(edge: float, first: float) -> None:
    runs: list[int] = []

    def run(place: int) -> Met:
        runs.append(place)
        return np.full(400, rate_at(place) <= edge)

    found = search(run, place_of(first))
    assert len(runs) == len(set(runs)) == len(found) <= 26
    if edge < LOWEST_RATE / 1.03:
        assert goodput(found) == 0.0
    elif edge > 2000:
        assert goodput(found) > 1900
    elif edge > LOWEST_RATE * 1.03:
        assert goodput(found) == pytest.approx(edge, rel=0.021)
