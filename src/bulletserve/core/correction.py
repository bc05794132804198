"""Factors by which observed steps differ from their forecasts: what the estimator publishes and a snapshot carries.

Knows nothing about how they are found (`estimator/correction` does).
"""

from typing import NamedTuple

from bulletserve.core.operators import Kind


class Correction(NamedTuple):
    """Factors on forecast seconds, by kind of step. A value of a snapshot: equal corrections, equal decisions."""

    prefill: float = 1.0
    decode: float = 1.0
    mixed: float = 1.0

    def of(self, kind: Kind) -> float:
        """The factor for steps of a kind."""
        return self.prefill if kind == "prefill" else self.decode if kind == "decode" else self.mixed


NO_CORRECTION = Correction()
"""Forecasts as they are."""

NO_ERRORS = Correction(0.0, 0.0, 0.0)
"""Forecast errors by kind of step where nothing was compared yet."""
