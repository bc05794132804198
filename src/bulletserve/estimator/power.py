"""The clock that the power cap allows while given steps run, each again and again.

Knows nothing about operators. A device draws its static watts and each step's energy over its time; a lower clock costs
time and saves the SMs' energy (lower voltage), not the memory's, so power rises with the clock and one clock meets the
cap:    static_w + sum over steps of (sm_j x clock^voltage + memory_j) / seconds(clock) = power_cap_w.
"""

from math import exp, log
from typing import NamedTuple

from bulletserve.estimator.parameters import Parameters
from bulletserve.estimator.roofs import Curve, Roofs

_TOLERANCE = 3e-7  # of the cap
_MOST_ROUNDS = 40

Drawing = tuple[tuple[Roofs, Curve], ...]
"""What runs at the same time: one or two steps."""


class Clock(NamedTuple):
    """The clock as a share of the highest, and the device's power at it."""

    ratio: float
    watts: float


def watts_at(constants: Parameters, running: Drawing, ratio: float) -> float:
    """The device's power at a clock, cap or not."""
    total, falls = constants.static_w, ratio**constants.voltage
    for step, curve in running:
        total += (step.sm_j * falls + step.memory_j) / curve.seconds(ratio)
    return total


def allowed_clock(constants: Parameters, running: Drawing) -> Clock:
    """The highest clock at which `running` stays within the cap; the lowest there is where none does."""
    cap, room = constants.power_cap_w, constants.power_cap_w - constants.static_w
    watts = watts_at(constants, running, 1.0)
    if watts <= cap:
        return Clock(1.0, watts)
    # Above the static watts power is nearly a power of the clock, of at most 1 + voltage: secants on logarithms, and
    # halves where a secant leaves the bracket.
    least = log(constants.least_clock)
    low, high, at, before = least, 0.0, 0.0, 0.0
    over = before_over = log((watts - constants.static_w) / room)
    step = -over / (1.0 + constants.voltage)
    for _ in range(_MOST_ROUNDS):
        at, before, before_over = _inside(at + step, low, high, least), at, over
        watts = watts_at(constants, running, exp(at))
        over = log((watts - constants.static_w) / room)
        if abs(watts - cap) < _TOLERANCE * cap or (over > 0.0 and at == least):
            break
        if over > 0.0:
            high = at
        else:
            low = at
        step = over * (before - at) / (over - before_over) if over != before_over else low - at
    return Clock(exp(at), watts)


def _inside(at: float, low: float, high: float, least: float) -> float:
    """`at` if it lies between `low` and `high`, else the middle, or the lowest clock while that is untried."""
    if low < at < high:
        return at
    return least if low == least and at <= low else 0.5 * (low + high)
