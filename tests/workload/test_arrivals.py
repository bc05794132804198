"""Arrival processes: one a second in the mean, with the variation they are named after."""

from itertools import pairwise
from statistics import mean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.errors import ConfigError
from bulletserve.workload.arrivals import Arrivals, one_a_second, recorded_rate
from bulletserve.workload.request_list import RequestLengths, with_new_gaps

MANY = tuple(RequestLengths(0.0, number + 1, 2) for number in range(6000))
kinds = st.sampled_from(["poisson", "even", "gamma:0.3", "gamma:1", "gamma:2.5"])


def gaps(requests: tuple[RequestLengths, ...]) -> list[float]:
    return [b.arrival_s - a.arrival_s for a, b in pairwise(requests)]


@given(text=kinds, seed=st.integers(0, 10_000), count=st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_the_order_and_lengths_stay_and_the_seed_decides(text: str, seed: int, count: int) -> None:
    arrivals = Arrivals.parse(text)
    made = arrivals.arrange(MANY[:count], seed)
    assert [r.prompt_tokens for r in made] == list(range(1, count + 1))
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(made)) and made[0].arrival_s >= 0
    assert made == arrivals.arrange(MANY[:count], seed)
    assert made == arrivals.arrange(MANY[: count + 5], seed)[:count], "a longer list begins alike"
    if text != "even":
        assert made != arrivals.arrange(MANY[:count], seed + 1)


@pytest.mark.parametrize(("text", "variation"), [("poisson", 1), ("gamma:0.5", 0.5), ("gamma:1", 1), ("gamma:2", 2)])
def test_gaps_have_their_mean_and_variation(text: str, variation: float) -> None:
    found = gaps(Arrivals.parse(text).arrange(MANY, 5))
    assert mean(found) == pytest.approx(1.0, abs=4 * variation / len(found) ** 0.5)
    assert pstdev(found) / mean(found) == pytest.approx(variation, rel=0.1)
    if variation == 1:  # memoryless: exponential
        assert sum(gap > 2 for gap in found) / len(found) == pytest.approx(0.1353, abs=0.02)


def test_even_gaps_are_even_and_poisson_is_what_the_simulator_has() -> None:
    assert set(gaps(Arrivals.parse("even").arrange(MANY[:50], 0))) == {1.0}
    assert Arrivals.parse("poisson").arrange(MANY[:50], 3) == with_new_gaps(MANY[:50], 3)


def test_recorded_arrivals_are_left_and_a_trace_is_put_on_one_a_second() -> None:
    recorded = tuple(RequestLengths(t, 1, 2) for t in (10.0, 10.5, 12.0, 14.0))
    assert Arrivals.parse("recorded").arrange(recorded, 1) == recorded
    assert recorded_rate(recorded) == 0.75
    assert [r.arrival_s for r in one_a_second(recorded)] == [0.0, 0.375, 1.5, 3.0]
    for useless in (recorded[:1], (), (recorded[0],) * 3):
        with pytest.raises(ConfigError, match="one moment"):
            recorded_rate(useless)


@pytest.mark.parametrize(
    "text", ["", "gamma", "gamma:", "gamma:0", "gamma:-1", "gamma:nan", "gamma:99", "poisson:2", "x"]
)
def test_what_is_no_kind_of_arrivals(text: str) -> None:
    with pytest.raises(ConfigError, match="gamma:CV"):
        Arrivals.parse(text)


@pytest.mark.parametrize("text", ["recorded", "even", "poisson", "gamma:0.25"])
def test_a_kind_is_written_as_it_was_named(text: str) -> None:
    assert Arrivals.parse(text).describe() == text
