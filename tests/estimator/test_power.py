"""The clock under a power cap, on curves of any shape that physics allows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulletserve.estimator.parameters import Parameters
from bulletserve.estimator.power import Drawing, allowed_clock, watts_at
from bulletserve.estimator.roofs import Curve, Roofs
from tests.estimator.devices import CAPPED

times = st.floats(1e-9, 1.0)
joules = st.floats(1e-6, 1e3)


@st.composite
def running(draw: st.DrawFn) -> Drawing:
    """One or two steps of a few operators; some wait for the host whatever the clock."""
    found = []
    for _ in range(draw(st.integers(1, 2))):
        knee, overlap = draw(st.floats(1.5, 16.0)), draw(st.floats(1.0, 16.0))
        count = draw(st.integers(1, 3))
        rows = tuple((draw(times) ** overlap, draw(times) ** knee, draw(times) ** knee) for _ in range(count))
        curve = Curve(rows, knee, overlap, draw(times), draw(st.sampled_from([0.0, 0.5, 3.0])))
        step = Roofs(1.0, rows, 0.0, 0.0, 0.0, 0.0, 0.0, draw(joules), draw(joules), 0.0, 0.0)
        found.append((step, curve))
    return tuple(found)


@given(running(), st.floats(0.3, 2.5), st.floats(180.0, 5000.0))
def test_the_clock_is_the_highest_within_the_cap(steps: Drawing, voltage: float, cap: float) -> None:
    constants = replace(CAPPED, voltage=voltage, power_cap_w=cap)
    clock = allowed_clock(constants, steps)
    assert clock.watts == pytest.approx(watts_at(constants, steps, clock.ratio), rel=1e-9)
    if clock.ratio == 1.0:
        assert clock.watts <= cap
    elif clock.ratio > constants.least_clock * (1 + 1e-9):
        assert clock.watts == pytest.approx(cap, rel=1e-6)
    else:
        assert clock.watts >= cap * (1 - 1e-6)


@given(running(), st.floats(0.3, 2.5), st.floats(0.3, 1.0), st.floats(0.3, 1.0))
def test_power_rises_with_the_clock(steps: Drawing, voltage: float, a: float, b: float) -> None:
    constants = replace(CAPPED, voltage=voltage)
    slow, fast = sorted((a, b))
    assert watts_at(constants, steps, slow) <= watts_at(constants, steps, fast) * (1 + 1e-12)
    assert watts_at(constants, steps, slow) > constants.static_w


def test_a_compute_bound_step_at_the_cap() -> None:
    """With energy as clock ** 1 and time as 1 / clock, dynamic power is clock ** 2."""
    constants: Parameters = replace(CAPPED, voltage=1.0, static_w=100.0, power_cap_w=500.0)
    curve = Curve(((1.0, 0.0, 0.0),), 4.0, 1.0, 0.0, 0.0)
    step = Roofs(1.0, curve.rows, 1.0, 0.0, 1.0, 0.0, 0.0, 1600.0, 0.0, 0.0, 0.0)
    assert allowed_clock(constants, ((step, curve),)).ratio == pytest.approx(0.5, rel=1e-6)
