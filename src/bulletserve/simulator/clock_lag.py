"""How far a card's clock has come down to what its power cap allows: the cap holds the mean power of a while.

Knows nothing about steps. Forecasts are of a step that runs again and again; a heavy step after light ones still finds
the highest clock. Measured on an H200 (two recorded runs of mixed steps between decode steps, docs/LOG.md): mixed steps
of 512 tokens begin at 12.1 ms and come to 14.0 over some 70 ms, as if the clock went by the power that the last 40 ms
asked for. With a mean m of what is asked for and a step that asks for d above the cap c, the clock has come
(m - c) / (d - c) of the way; m nears d by exp(-t / 40 ms), so that a step's mean over its time has a closed form.
"""

from math import exp, inf, log

from bulletserve.simulator.truth import Pace

MEMORY_S = 0.04


class ClockLag:
    """The power that was asked for of late, as a mean over `MEMORY_S`. `cap_w` infinite: nothing lags."""

    def __init__(self, idle_w: float, cap_w: float) -> None:
        self._idle_w, self._cap_w = idle_w, cap_w
        self._mean_w = idle_w

    def passed(self, seconds: float, asked_w: float | None) -> None:
        """Time went by in which `asked_w` would have been drawn at the highest clock; None: nothing ran."""
        if self._cap_w < inf:
            asked_w = self._idle_w if asked_w is None else asked_w
            self._mean_w = asked_w + (self._mean_w - asked_w) * exp(-seconds / MEMORY_S)

    def seconds(self, pace: Pace, left: float) -> float:
        """What a whole step takes at the mean speed of its last `left` (a share), begun now and not disturbed."""
        held_s = pace.steady_s - pace.top_s
        if held_s <= 0.0 or self._cap_w == inf:
            return pace.steady_s
        return pace.top_s + held_s * self._way_down(pace.asked_w, left * pace.steady_s)

    def _way_down(self, asked_w: float, lasts_s: float) -> float:
        """The mean over the next `lasts_s`; 0: the highest clock, 1: the steady one."""
        over_w = asked_w - self._cap_w
        if over_w <= 0.0 or lasts_s <= 0.0:
            return 1.0
        below = (
            asked_w - self._mean_w
        ) / over_w  # above 1: the mean is below the cap; below 0: beyond the steady clock
        if below <= 0.0:
            return 1.0
        free_s = max(0.0, MEMORY_S * log(below))
        if free_s >= lasts_s:
            return 0.0
        fading = MEMORY_S * below * (exp(-free_s / MEMORY_S) - exp(-lasts_s / MEMORY_S))
        return (lasts_s - free_s - fading) / lasts_s
