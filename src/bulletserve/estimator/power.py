"""The clock that the power cap allows while given steps run, each again and again.

Knows nothing about operators. A device draws its static watts and each step's energy over its time; a lower clock costs
time and saves the SMs' energy (lower voltage), not the memory's, so power rises with the clock and one clock meets the
cap:    static_w + sum over steps of (sm_j x clock^voltage + memory_j) / seconds(clock) = power_cap_w.
"""

from math import exp, log
from typing import NamedTuple

from bulletserve.estimator.parameters import Parameters
from bulletserve.estimator.roofs import SHARPNESS, Roofs, Slowed, body_at

_NEAR = 6e-3
"""So near to the wanted clock (as a logarithm) the rest of the way is straight, to 2e-5 of a step's time."""

_MOST_ROUNDS = 40

Running = tuple[tuple[Roofs, Slowed], ...]
"""What runs at the same time: one or two steps, each with what the other does to it."""


class Clock(NamedTuple):
    """The clock as a share of the highest, the device's power at it, and each step's seconds in operators at it and at
    the highest."""

    ratio: float
    watts: float
    body_s: tuple[float, ...]
    top_s: tuple[float, ...]


_Draw = tuple[float, float, list[float], list[float]]
"""At one clock: power above the static, how it rises (d log watts / d log clock), each step's seconds in operators and
how they fall."""


def watts_at(constants: Parameters, running: Running, ratio: float) -> float:
    """The device's power at a clock, cap or not."""
    return constants.static_w + _draw(constants, running, ratio)[0]


def allowed_clock(constants: Parameters, running: Running) -> Clock:
    """The highest clock at which `running` stays within the cap; the lowest there is where none does.

    Newton's steps on logarithms, where power is nearly a straight line, and halves where one leaves the bracket.
    """
    room = constants.power_cap_w - constants.static_w
    dynamic_w, rises, bodies, falling = _draw(constants, running, 1.0)
    top_s = tuple(bodies)
    if dynamic_w <= room:
        return Clock(1.0, constants.static_w + dynamic_w, top_s, top_s)
    least = log(constants.least_clock)
    low, high, at = least, 0.0, 0.0
    for _ in range(_MOST_ROUNDS):
        over = log(dynamic_w / room)
        if over > 0.0 and at == least:
            break
        step = -over / rises
        if -_NEAR < step < _NEAR and at + step > least:
            near_s = tuple([body - falls * step for body, falls in zip(bodies, falling, strict=True)])
            return Clock(exp(at + step), constants.power_cap_w, near_s, top_s)
        if over > 0.0:
            high = at
        else:
            low = at
        at = _inside(at + step, low, high, least)
        dynamic_w, rises, bodies, falling = _draw(constants, running, exp(at))
    return Clock(exp(at), constants.static_w + dynamic_w, tuple(bodies), top_s)


def _draw(constants: Parameters, running: Running, ratio: float) -> _Draw:
    knee, overlap, voltage = constants.knee, constants.overlap, constants.voltage
    clock_pace, falls_j = ratio**-SHARPNESS, ratio**voltage
    to_c, to_s = overlap / SHARPNESS, knee / SHARPNESS
    watts = rises = 0.0
    bodies: list[float] = []
    fallings: list[float] = []
    for step, (slow_c, slow_s, slow_d) in running:
        pace_c, pace_s = clock_pace + slow_c - 1.0, clock_pace + slow_s - 1.0
        falls = clock_pace / pace_c, clock_pace / pace_s
        body_s, falling_s = body_at(step.rows, (pace_c**to_c, pace_s**to_s, slow_d), falls, knee, overlap)
        bodies.append(body_s)
        fallings.append(falling_s)
        seconds, sm_j = body_s + step.launch_s, step.sm_j * falls_j
        if seconds < step.least_s:
            seconds, falling_s = step.least_s, 0.0
        own = (sm_j + step.memory_j) / seconds
        watts += own
        rises += sm_j / seconds * voltage + own * falling_s / seconds
    return watts, rises / watts, bodies, fallings


def _inside(at: float, low: float, high: float, least: float) -> float:
    """`at` if it lies between `low` and `high`, else the middle, or the lowest clock while that is untried."""
    if low < at < high:
        return at
    return least if low == least and at <= low else 0.5 * (low + high)
