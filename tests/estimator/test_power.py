"""The clock under a power cap, on steps of any kind that physics allows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulletserve.estimator.parameters import Parameters
from bulletserve.estimator.power import Running, allowed_clock, watts_at
from bulletserve.estimator.roofs import ALONE, Roofs
from tests.estimator.devices import CAPPED

times = st.floats(1e-9, 1.0)
joules = st.floats(1e-6, 1e3)
paces = st.floats(1.0, 3.0)


@st.composite
def devices(draw: st.DrawFn) -> Parameters:
    knee, overlap, voltage = draw(st.floats(1.5, 16.0)), draw(st.floats(1.0, 16.0)), draw(st.floats(0.3, 2.5))
    return replace(CAPPED, knee=knee, overlap=overlap, voltage=voltage, power_cap_w=draw(st.floats(180.0, 5000.0)))


@st.composite
def running(draw: st.DrawFn, constants: Parameters) -> Running:
    """One or two steps of a few operators; some wait for the host whatever the clock."""
    found = []
    for _ in range(draw(st.integers(1, 2))):
        operators = [(draw(st.sampled_from([0.0, 1.0])) * draw(times), draw(times), draw(times)) for _ in range(3)]
        p, k = constants.overlap, constants.knee
        rows = tuple((c**p, s**k, d**k) for c, s, d in operators)
        step = Roofs(
            1.0, rows, 0.0, 0.0, 0.0, draw(times), draw(st.sampled_from([0.0, 0.5, 3.0])), draw(joules), draw(joules),
            0.0, 0.0,
        )  # fmt: skip
        pace_c, pace_s = draw(paces), draw(paces)
        slowed = (
            pace_c**constants.overlap, pace_s**constants.knee, draw(st.floats(1.0, 8.0)), pace_c - 1.0, pace_s - 1.0
        )  # fmt: skip
        found.append((step, draw(st.sampled_from([ALONE, slowed]))))
    return tuple(found)


@given(devices(), st.data())
def test_the_clock_is_the_highest_within_the_cap(constants: Parameters, data: st.DataObject) -> None:
    steps = data.draw(running(constants))
    clock = allowed_clock(constants, steps)
    seconds = [
        max(body + step.launch_s * (1.0 + slowed[-1]), step.least_s)
        for body, (step, slowed) in zip(clock.body_s, steps, strict=True)
    ]
    falls = clock.ratio**constants.voltage
    drawn = sum((step.sm_j * falls + step.memory_j) / s for s, (step, _) in zip(seconds, steps, strict=True))
    assert clock.watts == pytest.approx(constants.static_w + drawn, rel=1e-4)
    assert clock.watts == pytest.approx(watts_at(constants, steps, clock.ratio), rel=1e-4)
    if clock.ratio == 1.0:
        assert clock.watts <= constants.power_cap_w
    elif clock.ratio > constants.least_clock * (1 + 1e-9):
        assert watts_at(constants, steps, clock.ratio) == pytest.approx(constants.power_cap_w, rel=1e-4)
    else:
        assert clock.watts >= constants.power_cap_w * (1 - 1e-4)


@given(devices(), st.data(), st.floats(0.3, 1.0), st.floats(0.3, 1.0))
def test_power_rises_with_the_clock(constants: Parameters, data: st.DataObject, a: float, b: float) -> None:
    steps = data.draw(running(constants))
    slow, fast = sorted((a, b))
    assert watts_at(constants, steps, slow) <= watts_at(constants, steps, fast) * (1 + 1e-12)
    assert watts_at(constants, steps, slow) > constants.static_w


def test_a_compute_bound_step_at_the_cap() -> None:
    """With energy as clock ** 1 and time as 1 / clock, dynamic power is clock ** 2."""
    constants: Parameters = replace(CAPPED, voltage=1.0, overlap=1.0, static_w=100.0, power_cap_w=500.0)
    step = Roofs(1.0, ((1.0, 1e-60, 1e-60),), 1.0, 0.0, 1.0, 0.0, 0.0, 1600.0, 0.0, 0.0, 0.0)
    clock = allowed_clock(constants, ((step, ALONE),))
    assert clock.ratio == pytest.approx(0.5, rel=1e-5)
    assert clock.top_s == pytest.approx((1.0,)) and clock.body_s == pytest.approx((2.0,), rel=1e-5)
