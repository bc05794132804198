"""Factors by which observed steps differ from their forecasts: what the estimator publishes and a snapshot carries.

Knows nothing about how they are found (`estimator/correction` does).
"""

from typing import NamedTuple

from bulletserve.core.operators import Kind


class Correction(NamedTuple):
    """Factors on forecast seconds, by kind of step and by whether the other lane runs meanwhile: what is forecast worst
    is what lanes do to each other, and not each card is the same in it. A value of a snapshot: equal corrections, equal
    decisions."""

    prefill: float = 1.0
    decode: float = 1.0
    mixed: float = 1.0
    prefill_beside: float = 1.0
    decode_beside: float = 1.0

    def of(self, kind: Kind, *, beside: bool = False) -> float:
        """The factor for steps of a kind, alone or beside a step of the other lane."""
        if kind == "decode":
            return self.decode_beside if beside else self.decode
        if kind == "prefill":
            return self.prefill_beside if beside else self.prefill
        return self.mixed


NO_CORRECTION = Correction()
"""Forecasts as they are."""

NO_ERRORS = Correction(0.0, 0.0, 0.0, 0.0, 0.0)
"""Forecast errors by kind of step where nothing was compared yet."""
