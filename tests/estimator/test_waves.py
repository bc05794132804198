"""The grid that counts are rounded to, and the loss in part-filled waves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulletserve.estimator.grid import above, near
from bulletserve.estimator.waves import same_tiles, wave_factor

counts = st.integers(0, 10**9)
tiles = (st.floats(0.5, 1.0), st.floats(0.005, 0.6))


@given(counts, counts)
def test_rounding_keeps_order_and_is_close(a: int, b: int) -> None:
    for rounded in (near, above):
        assert (rounded(a) <= rounded(b)) or a > b
        assert rounded(rounded(a)) == rounded(a)
    assert abs(near(a) - a) <= a / 64
    assert 0 <= above(a) - a <= a / 32


@given(st.integers(0, 64))
def test_small_counts_are_exact(count: int) -> None:
    assert near(count) == above(count) == count


@given(counts)
def test_the_grid_is_coarse_enough_to_meet_again(count: int) -> None:
    """At most 32 numbers for each doubling."""
    assert len({near(n) for n in range(1024, 2048)}) <= 33
    assert near(count) % (1 << max(0, count.bit_length() - 6)) == 0


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 40000), st.integers(1, 200), *tiles, st.booleans())
def test_more_rows_never_take_less_time(
    a: int, b: int, n: int, sms: int, small: float, split: float, whole: bool
) -> None:
    less, more = (m * wave_factor(m, n, sms, small, split, whole=whole) for m in sorted((a, b)))
    assert less <= more * (1 + 1e-12)


@given(st.integers(1, 9000), st.integers(1, 40000), st.integers(1, 200), st.integers(1, 200), *tiles, st.booleans())
def test_more_sms_never_take_more_time(m: int, n: int, a: int, b: int, small: float, split: float, whole: bool) -> None:
    slow, fast = (wave_factor(m, n, sms, small, split, whole=whole) / sms for sms in sorted((a, b)))
    assert fast <= slow * (1 + 1e-12)


@given(st.integers(1, 9000), st.integers(1, 40000), st.integers(1, 200), *tiles)
def test_nothing_beats_full_waves_of_the_best_tile(m: int, n: int, sms: int, small: float, split: float) -> None:
    shared, whole = (wave_factor(m, n, sms, small, split, whole=whole) for whole in (False, True))
    assert 1 - 1e-12 <= shared <= whole * (1 + 1e-12)


def test_whole_waves_lose_nothing_and_one_tile_more_costs_a_turn() -> None:
    """6144 columns are 24 tiles: 11 rows of tiles are two whole waves of 132 SMs."""
    assert wave_factor(11 * 128, 6144, 132, 0.85, 0.5) == pytest.approx(1.0)
    full, next_wave = (m * wave_factor(m, 6144, 132, 0.85, 0.5) for m in (11 * 128, 11 * 128 + 1))
    assert 1.1 < next_wave / full < 1.5


def test_few_tiles_are_shared() -> None:
    """32 rows of a square weight fill a tenth of the SMs unless programs share tiles."""
    assert wave_factor(32, 4096, 132, 0.9, 0.05) < 0.6 * wave_factor(32, 4096, 132, 0.9, 0.6) * 1.6
    alone = 132 / (4096 / 256)
    assert wave_factor(128, 4096, 132, 0.9, 0.05) < alone / 4


@given(st.integers(1, 9000), st.integers(1, 40000), st.integers(1, 200), *tiles)
def test_rows_that_fill_the_same_tiles_take_the_same_time(m: int, n: int, sms: int, small: float, split: float) -> None:
    top = same_tiles(m)
    assert m <= top == same_tiles(top)
    for whole in (False, True):
        own, greatest = (rows * wave_factor(rows, n, sms, small, split, whole=whole) for rows in (m, top))
        assert own == pytest.approx(greatest)


def test_whole_tiles_lose_whole_waves() -> None:
    """512 rows of 4096 columns are 128 small tiles: two turns on 68 SMs and on 116 alike, as measured on an H200; 52
    SMs that have 16 large tiles share none, 132 that have as many share each by eight."""
    slow, fast = (wave_factor(512, 4096, sms, 1.0, 0.1, whole=True) / sms for sms in (68, 116))
    assert slow == fast
    assert wave_factor(512, 4096, 116, 1.0, 0.1) < 0.75 * wave_factor(512, 4096, 116, 1.0, 0.1, whole=True)
    few, many = (wave_factor(128, 4096, sms, 1.0, 0.1, whole=True) / sms for sms in (31, 132))
    assert many == pytest.approx(1.1 / 8 * few)
