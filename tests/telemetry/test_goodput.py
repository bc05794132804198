"""Goodput: what a crossing is, what its interval covers, and what may be compared."""

from math import isnan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo
from bulletserve.telemetry.goodput import (
    LONG_TIERS,
    TIERS,
    Curve,
    Met,
    counted,
    crossing,
    estimate,
    geometric_mean,
    goodput,
    met,
    ratio,
    scored,
    tiers_of,
)
from bulletserve.telemetry.latency import Answer


def flags(share: float, count: int = 400) -> Met:
    """A share of requests that met their targets, the first ones."""
    return np.arange(count) < round(share * count)


def curve(**attained: float) -> Curve:
    return {float(rate.removeprefix("at").replace("_", ".")): flags(share) for rate, share in attained.items()}


def test_tiers_are_those_of_the_definition() -> None:
    assert [(t.name, t.ttft_s, t.tpot_s) for t in TIERS] == [
        ("loose", 0.3, 0.020), ("middle", 0.3, 0.012), ("tight", 0.3, 0.008),
    ]  # fmt: skip
    assert [(t.ttft_s, t.tpot_s) for t in LONG_TIERS] == [(2.0, 0.040), (2.0, 0.025), (2.0, 0.015)]
    assert tiers_of("azure-code") is TIERS and tiers_of("long-context") is LONG_TIERS


def test_all_of_a_short_list_counts_and_the_middle_of_a_long_one() -> None:
    assert (counted(1), counted(239), counted(240), counted(600)) == (range(1), range(239), scored(240), scored(600))


def test_scored_are_the_middle_requests() -> None:
    assert (scored(600)[0], scored(600)[-1], len(scored(600))) == (100, 499, 400)
    assert (scored(240)[0], scored(240)[-1]) == (40, 199)
    with pytest.raises(ConfigError, match="600 requests"):
        scored(100)


def test_an_answer_meets_both_targets_or_none() -> None:
    slo = Slo("x", 0.3, 0.02)
    answers = [Answer(0.0, 5, [0.3, 0.319]), Answer(0.0, 5, [0.31, 0.32]), Answer(0.0, 5, [0.1, 0.13]), Answer(0.0, 5)]
    assert met(answers, slo).tolist() == [True, False, False, False]


def test_the_crossing_is_on_the_line_between_two_rates() -> None:
    assert crossing([1.0, 2.0, 3.0], [1.0, 0.95, 0.85]) == pytest.approx(2.5)
    assert crossing([1.0, 2.0, 3.0], [1.0, 0.9, 0.9]) == 3.0
    assert crossing([1.0, 2.0], [0.89, 0.95]) == 0.0
    assert crossing([1.0, 2.0, 3.0, 4.0], [0.95, 0.85, 0.95, 0.0]) == pytest.approx(1.5), "it has to stay above"


def test_rates_too_far_apart_are_no_measurement() -> None:
    assert goodput(curve(at10=0.95, at10_4=0.85)) == pytest.approx(10.2)
    with pytest.raises(ConfigError, match="at most 5 % apart"):
        goodput(curve(at10=0.95, at11=0.85))
    assert goodput(curve(at0_1=0.5)) == 0.0


@given(
    goods=st.lists(st.floats(0.90, 1.0), min_size=1, max_size=8),
    bads=st.lists(st.floats(0, 0.89), min_size=1, max_size=8),
)
@settings(max_examples=200, deadline=None)
def test_a_crossing_lies_between_its_neighbours(goods: list[float], bads: list[float]) -> None:
    attained = [*sorted(goods, reverse=True), *sorted(bads, reverse=True)]
    rates = [1.02**i for i in range(len(attained))]
    assert rates[len(goods) - 1] <= crossing(rates, attained) <= rates[len(goods)]


def bernoulli(centre: float, seed: int) -> Curve:
    """Attainment falls by 1 % a step of 2 %, through 90 % at `centre`."""
    rng = np.random.default_rng(seed)
    return {centre * 1.02**k: rng.random(400) < 0.9 - 0.01 * k for k in range(-8, 9)}


def test_the_interval_covers_what_is_true_about_as_often_as_it_says() -> None:
    covered = sum(one.low <= 10.0 <= one.high for one in (estimate([bernoulli(10.0, s)]) for s in range(30)))
    assert covered >= 20  # one crossing of many falls early now and then: "stays at or above" looks at all of them


def test_more_seeds_narrow_the_interval() -> None:
    one, five = estimate([bernoulli(10.0, 1)]), estimate([bernoulli(10.0, s) for s in range(8)])
    assert five.high - five.low < one.high - one.low
    assert "[" in one.describe()


def test_a_ratio_is_paired() -> None:
    """Half the requests are hard for both: their number varies from draw to draw, and the ratio does not."""
    ours = {rate: flags(share) for rate, share in ((1.1, 0.92), (1.122, 0.88))}
    theirs = {rate: flags(share) for rate, share in ((1.0, 0.92), (1.02, 0.88))}
    found = ratio([ours], [theirs])
    assert found is not None
    assert found.value == pytest.approx(1.1)
    assert found.low == pytest.approx(1.1, rel=0.005) and found.high == pytest.approx(1.1, rel=0.005)
    alone = estimate([ours])
    assert alone.high - alone.low > 0.01


def test_ratios_are_capped_and_nothing_over_nothing_is_left_out() -> None:
    none, some = curve(at0_1=0.5), curve(at10=0.95, at10_2=0.85)
    assert ratio([none], [none]) is None
    capped, nothing = ratio([some], [none]), ratio([none], [some])
    assert capped is not None and capped.value == capped.low == capped.high == 3.0
    assert nothing is not None and nothing.value == 0.0
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert isnan(geometric_mean([]))
    with pytest.raises(ConfigError, match="same seeds"):
        ratio([some, some], [some])
