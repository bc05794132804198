"""The clock that the power cap allows while given steps run, each again and again.

Knows nothing about operators. A device draws its static watts and each step's energy over its time; a lower clock costs
time and saves the SMs' energy (lower voltage), not the memory's, so power rises with the clock and one clock meets the
cap:    static_w + sum over steps of (sm_j x clock^voltage + memory_j) / seconds(clock) = power_cap_w.
"""

from math import exp, log, log1p
from typing import NamedTuple

from bulletserve.estimator.parameters import Parameters
from bulletserve.estimator.roofs import Roofs, Slowed, body_at

_NEAR = 8e-3
"""So near to the wanted clock (as a logarithm) the rest of the way is straight, to 4e-5 of a step's time."""

_THERE = 1e-6
"""So near that a bend on the way changes nothing that counts."""

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


_Draw = tuple[float, float, list[float], list[float], float, float]
"""At one clock: power above the static, how it rises (d log watts / d log clock), each step's seconds in operators and
how they fall; how much faster power would rise if loads set no pace any more, and what that makes of it by then."""


def watts_at(constants: Parameters, running: Running, ratio: float) -> float:
    """The device's power at a clock, cap or not."""
    return constants.static_w + _draw(constants, running, ratio)[0]


def allowed_clock(constants: Parameters, running: Running) -> Clock:
    """The highest clock at which `running` stays within the cap; the lowest there is where none does.

    Newton's steps on logarithms, where power is nearly a line with a bend at each clock that takes a pace over from
    loads, and halves where one leaves the bracket. The first step takes all bends as one.
    """
    room = constants.power_cap_w - constants.static_w
    dynamic_w, rises, bodies, falling, later, late = _draw(constants, running, 1.0)
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
        if -_NEAR < step < _NEAR and at + step > least and _is_straight(running, at, step, later):
            near_s = tuple([body - falls * step for body, falls in zip(bodies, falling, strict=True)])
            return Clock(exp(at + step), constants.power_cap_w, near_s, top_s)
        if at == 0.0 and later:
            step = max(step, -(over + late) / (rises + later))
        if over > 0.0:
            high = at
        else:
            low = at
        at = _inside(at + step, low, high, least)
        dynamic_w, rises, bodies, falling, later, late = _draw(constants, running, exp(at))
    return Clock(exp(at), constants.static_w + dynamic_w, tuple(bodies), top_s)


def _draw(constants: Parameters, running: Running, ratio: float) -> _Draw:
    knee, overlap, voltage = constants.knee, constants.overlap, constants.voltage
    clock_c, clock_s, falls_j = ratio**-overlap, ratio**-knee, ratio**voltage
    watts = rises = later = late = 0.0
    bodies: list[float] = []
    fallings: list[float] = []
    for step, (loads_c, loads_s, slow_d, wait_c, wait_s) in running:
        by_c, by_s = clock_c >= loads_c, clock_s >= loads_s
        factors = clock_c if by_c else loads_c, clock_s if by_s else loads_s, slow_d
        body_s, with_c, with_s = body_at(step.rows, factors, knee, overlap)
        seconds, sm_j = body_s + step.launch_s * (1.0 + wait_s), step.sm_j * falls_j
        waits = seconds < step.least_s
        if waits:
            seconds = step.least_s
        own = (sm_j + step.memory_j) / seconds
        watts += own
        per_s = 0.0 if waits else own / seconds
        if by_c and by_s:
            falling_s = with_c + with_s
        else:
            held_c, held_s = 0.0 if by_c else with_c, 0.0 if by_s else with_s
            falling_s = with_c + with_s - held_c - held_s
            later += per_s * (held_c + held_s)
            if ratio == 1.0:
                late += per_s * (held_c * log1p(wait_c) + held_s * log1p(wait_s))
        rises += sm_j / seconds * voltage + per_s * falling_s
        bodies.append(body_s)
        fallings.append(falling_s)
    return watts, rises / watts, bodies, fallings, later / watts, late / watts


def _is_straight(running: Running, at: float, step: float, later: float) -> bool:
    """Whether no clock on the way (a logarithm and a step) takes a pace over from loads."""
    if (step <= 0.0 and not later) or -_THERE < step < _THERE:
        return True
    one, other = exp(-at) - 1.0, exp(-at - step) - 1.0
    for _, (_, _, _, wait_c, wait_s) in running:
        if one < wait_c < other or other < wait_c < one or one < wait_s < other or other < wait_s < one:
            return False
    return True


def _inside(at: float, low: float, high: float, least: float) -> float:
    """`at` if it lies between `low` and `high`, else the middle, or the lowest clock while that is untried."""
    if low < at < high:
        return at
    return least if low == least and at <= low else 0.5 * (low + high)
