"""Online correction: fast enough, calm, bounded."""

import random
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.operators import Kind
from bulletserve.estimator.correction import LEAST, MOST, Correction, Corrector

KINDS: tuple[Kind, ...] = ("prefill", "decode", "mixed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [1.2, 1 / 1.2, 0.8])
def test_a_change_of_a_fifth_is_followed_within_fifty_steps(kind: Kind, change: float) -> None:
    corrector = Corrector()
    for _ in range(50):
        corrector.observe(kind, 0.010, 0.010 * change)
    assert corrector.published.of(kind) == pytest.approx(change, rel=0.02)
    assert [corrector.published.of(other) for other in KINDS if other != kind] == [1.0, 1.0]


def test_the_way_there_is_monotone() -> None:
    corrector = Corrector()
    seen = []
    for _ in range(200):
        corrector.observe("decode", 0.010, 0.012)
        seen.append(corrector.published.decode)
    assert seen == sorted(seen)
    assert seen[-1] <= 1.2


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("true", [1.0, 1.1, 0.85])
def test_noise_does_not_move_what_is_published(seed: int, true: float) -> None:
    """5 % noise: a few small changes in three thousand steps."""
    rng = random.Random(seed)
    corrector = Corrector()
    seen = []
    for _ in range(3000):
        corrector.observe("decode", 0.010, 0.010 * true * rng.lognormvariate(0.0, 0.05))
        seen.append(corrector.published.decode)
    settled = seen[100:]
    moves = [i for i, (a, b) in enumerate(pairwise(settled)) if a != b]
    assert sum(b - a > 5 for a, b in pairwise([-9, *moves])) <= 6, "counting what moves together once"
    assert min(settled) > true * 0.94 and max(settled) < true * 1.06


@given(st.floats(0.7, 1.4), st.floats(0.0, 0.05), st.integers(0, 2**32))
@settings(max_examples=40)
def test_a_change_under_noise_is_followed_and_then_left_alone(change: float, noise: float, seed: int) -> None:
    rng, corrector = random.Random(seed), Corrector()
    for _ in range(60):
        corrector.observe("prefill", 0.010, 0.010 * change * rng.lognormvariate(0.0, noise))
    assert corrector.published.prefill == pytest.approx(change, rel=0.08)


@given(st.integers(0, 30), st.integers(0, 2**32))
@settings(max_examples=40)
def test_stalls_now_and_then_do_not_move_it(gap: int, seed: int) -> None:
    """One step in thirty takes ten times as long."""
    rng, corrector = random.Random(seed), Corrector()
    for step in range(600):
        stalled = step % 30 == gap % 30
        corrector.observe("decode", 0.010, 0.010 * rng.lognormvariate(0.0, 0.02) * (10.0 if stalled else 1.0))
        assert corrector.published.decode < 1.05


@given(st.floats(-0.02, 0.02), st.floats(0.8, 1.25), st.integers(0, 2**32))
@settings(max_examples=60)
def test_a_plan_that_goes_by_it_does_not_swing(apart: float, device: float, seed: int) -> None:
    """Two splits whose forecasts are off by amounts that differ: each choice changes what is observed next. Within the
    dead band that is no news, so a plan that prefers one by a corrected forecast stays with it."""
    rng, corrector, choices = random.Random(seed), Corrector(), []
    forecasts = {"a": 0.0100, "b": 0.0105}
    off = {"a": device, "b": device * (1.0 + apart)}
    target_s = 0.0100 * device * (1.0 + rng.uniform(-0.1, 0.1))
    for _ in range(400):
        choice = "a" if forecasts["b"] * corrector.published.decode > target_s else "b"
        choices.append(choice)
        observed = forecasts[choice] * off[choice] * rng.lognormvariate(0.0, 0.01)
        corrector.observe("decode", forecasts[choice], observed)
    assert sum(one != other for one, other in pairwise(choices[100:])) <= 2


def test_one_stalled_step_is_no_news() -> None:
    corrector = Corrector()
    for _ in range(100):
        corrector.observe("prefill", 0.010, 0.010)
    corrector.observe("prefill", 0.010, 1.0)
    assert corrector.published.prefill < 1.03


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=300))
def test_the_ratio_is_bounded_whatever_is_observed(times: list[tuple[float, float]]) -> None:
    corrector = Corrector()
    for forecast_s, observed_s in times:
        corrector.observe("mixed", forecast_s, observed_s)
        assert LEAST <= corrector.published.mixed <= MOST


def test_what_cannot_be_a_time_is_ignored() -> None:
    corrector = Corrector()
    for forecast_s, observed_s in ((0.0, 1.0), (1.0, 0.0), (nan, 1.0), (1.0, nan), (-1.0, 1.0), (1.0, inf)):
        corrector.observe("decode", forecast_s, observed_s)
    assert corrector.published == Correction()


def test_published_values_are_shared_until_they_change() -> None:
    corrector = Corrector()
    before = corrector.published
    corrector.observe("decode", 0.010, 0.0101)
    assert corrector.published is before


def test_errors_are_those_of_corrected_forecasts() -> None:
    corrector = Corrector()
    for _ in range(20):
        corrector.observe("mixed", 0.010, 0.012)
    assert 0.01 < corrector.errors.mixed < 0.2 and corrector.errors.decode == 0.0
    for _ in range(400):
        corrector.observe("mixed", 0.010, 0.012)
    assert corrector.errors.mixed < 0.03
    assert set(corrector.mean_errors) == {"mixed"} and corrector.errors.mixed < corrector.mean_errors["mixed"] < 0.2
