"""What observed steps say about forecasts: one bounded ratio for each kind of step, alone and beside another.

Knows nothing about why a forecast was wrong (a neighbour on the card, a hot room, a foreign model). Observed is
log(observed / forecast), where the forecast is the uncorrected one: what is planned with the ratio does not feed back
into it. Two means follow it. The fast one sees a change within a few steps; once it is outside of a wide band around
what is published, that goes along with it until the change is over. The slow one averages noise away; what is published
moves to it where it leaves a narrow band. In between nothing moves, so noise cannot make plans flip, and one stalled
step counts as a bounded surprise only.
"""

from math import exp, inf, log

from bulletserve.core.correction import Correction
from bulletserve.core.operators import Kind

LEAST, MOST = 0.5, 2.0
"""Bounds of a ratio: beyond, the calibration is of another device."""

_FAST, _SLOW = 0.08, 0.01
"""Gains of a new observation. Of 5 % noise they leave 1 % and a third of a percent."""

_WIDE, _NARROW = 0.045, 0.015
"""Bands around what is published, as logarithms: four times what 5 % noise leaves of each mean."""

_FOLLOWED = 40
"""For so many steps what is published goes along with the fast mean: all but 4 % of a change is over then."""

_SURPRISE = 0.1  # most that one observation may differ from a mean, as a logarithm
_ERROR_GAIN = 0.02  # for the error that is told, about the last hundred steps

_LOW, _HIGH = log(LEAST), log(MOST)

_NAMES: dict[Kind, tuple[str, ...]] = {
    "prefill": ("prefill", "prefill_beside"),
    "decode": ("decode", "decode_beside"),
    "mixed": ("mixed",),
}
"""The ratios of a kind: alone first, then beside."""


class _Ratio:
    """Of one kind of step; logarithms. `following`: for how many more steps the fast mean is published."""

    __slots__ = ("error", "errors", "fast", "following", "published", "slow", "steps")

    def __init__(self) -> None:
        self.fast = self.slow = self.published = self.error = self.errors = 0.0
        self.following = self.steps = 0

    def observe(self, off: float) -> bool:
        """`off`: log(observed / forecast). Whether what is published has changed."""
        error = abs(exp(min(_HIGH, off - self.published)) - 1.0)
        self.error += _ERROR_GAIN * (error - self.error)
        self.errors += error
        self.steps += 1
        self.fast = _nearer(self.fast, off, _FAST)
        if abs(self.fast - self.published) > _WIDE:
            self.following = _FOLLOWED
        before = self.published
        if self.following:
            self.following -= 1
            self.slow = self.published = self.fast
        else:
            self.slow = _nearer(self.slow, off, _SLOW)
            if abs(self.slow - self.published) > _NARROW:
                self.published = self.slow
        return self.published != before


def _nearer(mean: float, off: float, gain: float) -> float:
    return min(_HIGH, max(_LOW, mean + gain * min(_SURPRISE, max(-_SURPRISE, off - mean))))


class Corrector:
    """Keeps the ratios. One thread; what it publishes is immutable and the same object until it changes."""

    def __init__(self) -> None:
        self._ratios = {name: _Ratio() for name in Correction._fields}
        self._published = Correction()

    @property
    def published(self) -> Correction:
        """The ratios to plan with."""
        return self._published

    @property
    def errors(self) -> Correction:
        """For each ratio, the mean |observed / corrected forecast - 1| of about the last hundred steps."""
        return Correction(*[ratio.error for ratio in self._ratios.values()])

    @property
    def mean_errors(self) -> dict[Kind, float]:
        """By kind of step, the plain mean over all steps so far, alone or not, of the kinds of which there were any."""
        found: dict[Kind, float] = {}
        for kind, names in _NAMES.items():
            ratios = [self._ratios[name] for name in names]
            if steps := sum(ratio.steps for ratio in ratios):
                found[kind] = sum(ratio.errors for ratio in ratios) / steps
        return found

    def observe(self, kind: Kind, forecast_s: float, observed_s: float, *, beside: bool = False) -> None:
        """A step ended, beside one of the other lane or not: its uncorrected forecast, and how long it took. What
        cannot be a time is ignored."""
        if not (0.0 < forecast_s < inf and 0.0 < observed_s < inf):
            return
        name = _NAMES[kind][-1 if beside else 0]
        ratio = self._ratios[name]
        if ratio.observe(log(observed_s) - log(forecast_s)):
            self._published = self._published._replace(**{name: min(MOST, max(LEAST, exp(ratio.published)))})
