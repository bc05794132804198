"""What observed steps say about forecasts: one bounded ratio for each kind of step.

Knows nothing about why a forecast was wrong (a neighbour on the card, a hot room, a foreign model). The ratio is a slow
mean of log(observed / forecast), where the forecast is the uncorrected one: what is planned with the ratio does not
feed back into it. A mean that moves less than a dead band does not move what is published, so noise cannot make plans
flip; one stalled step counts as a bounded surprise only.
"""

from math import exp, inf, log

from bulletserve.core.correction import Correction
from bulletserve.core.operators import Kind

LEAST, MOST = 0.5, 2.0
"""Bounds of a ratio: beyond, the calibration is of another device."""

_GAIN = 0.08  # of a new observation: nine tenths of a change within 28 steps, 1 % left of 5 % noise
_SURPRISE = 0.25  # most that one observation may differ from the mean, as a logarithm
_DEAD_BAND = 0.015  # of the logarithm

_LOW, _HIGH = log(LEAST), log(MOST)


class Corrector:
    """Keeps the means. One thread; what it publishes is immutable and the same object until it changes."""

    def __init__(self) -> None:
        self._means: dict[Kind, float] = {"prefill": 0.0, "decode": 0.0, "mixed": 0.0}
        self._published = Correction()

    @property
    def published(self) -> Correction:
        """The ratios to plan with."""
        return self._published

    def observe(self, kind: Kind, forecast_s: float, observed_s: float) -> None:
        """A step ended: its uncorrected forecast, and how long it took. What cannot be a time is ignored."""
        if not (0.0 < forecast_s < inf and 0.0 < observed_s < inf):
            return
        mean = self._means[kind]
        surprise = min(_SURPRISE, max(-_SURPRISE, log(observed_s) - log(forecast_s) - mean))
        mean = self._means[kind] = min(_HIGH, max(_LOW, mean + _GAIN * surprise))
        if abs(mean - log(self._published.of(kind))) > _DEAD_BAND:
            self._published = self._published._replace(**{kind: min(MOST, max(LEAST, exp(mean)))})
