"""Finds the rate at which attainment falls through 90 %, with as few runs as it can.

Knows nothing about what a run is. Rates lie on one grid, each 2 % above the one before, so that policies and tiers are
compared, and runs shared, at the same rates.
"""

from collections.abc import Callable
from math import floor, log

from bulletserve.telemetry.goodput import ATTAINED, Met

STEP = 1.02
LOWEST_RATE = 0.1
"""A policy that does not attain at this rate (requests a second) has no goodput."""

HIGHEST_RATE = 2000.0
_FIRST_JUMP = 6
_NEAR, _FAR = 3, 7  # steps from the crossing within which attainment must be known on either side


def rate_at(place: int) -> float:
    """Requests a second of a place on the grid."""
    return STEP**place


def place_of(rate: float) -> int:
    """The place of a rate, or the next one below it."""
    return floor(log(rate) / log(STEP) + 1e-9)


def search(run: Callable[[int], Met], first: int) -> dict[float, Met]:
    """The curve of all places that were run, beginning with `first`: two neighbours, one at 90 % and one below, are
    among them, unless it is below at the lowest rate or above at the highest. Some places further off are run too, for
    the interval. Where less load is no help, the lowest rate is tried at once: what fails there has no goodput."""
    lowest, highest = place_of(LOWEST_RATE), place_of(HIGHEST_RATE)
    found: dict[int, Met] = {}

    def attains(place: int) -> bool:
        if place not in found:
            found[place] = run(place)
        return float(found[place].mean()) >= ATTAINED

    def no_better(place: int, than: int) -> bool:
        return place != than and float(found[place].mean()) <= float(found[than].mean())

    good = bad = min(max(first, lowest), highest)
    jump = _FIRST_JUMP
    if attains(good):
        while attains(bad) and bad < highest:
            good, bad = bad, min(highest, bad + jump)
            jump *= 2
    else:
        while not attains(good) and good > lowest:
            bad, good = good, lowest if no_better(good, bad) else max(lowest, good - jump)
            jump *= 2
    decided = attains(good) and not attains(bad)  # else it is below at the lowest rate, or not even at the highest
    while decided and bad - good > 1:
        middle = (good + bad) // 2
        if attains(middle):
            good = middle
        else:
            bad = middle
    if lowest < good and bad < highest:
        for near, far in ((good - _FAR, good - _NEAR), (bad + _NEAR, bad + _FAR)):
            if not any(near <= place <= far for place in found):
                attains(max(lowest, (near + far) // 2))
    return {rate_at(place): flags for place, flags in found.items()}
