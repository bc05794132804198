"""Online correction: fast enough, calm, bounded."""

import random
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
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
def test_noise_does_not_move_what_is_published(seed: int) -> None:
    rng = random.Random(seed)
    corrector = Corrector()
    seen = []
    for _ in range(2000):
        corrector.observe("decode", 0.010, 0.010 * 1.1 * rng.lognormvariate(0.0, 0.05))
        seen.append(corrector.published.decode)
    settled = seen[100:]
    changes = sum(a != b for a, b in pairwise(settled))
    assert changes < 100, "one step in twenty at most sees another ratio than the one before"
    assert min(settled) > 1.1 * 0.95
    assert max(settled) < 1.1 * 1.05


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
