"""Lengths drawn by a rule that people write: `512`, `100-900`, `lognormal:800:0.6`.

Knows nothing about arrivals.
"""

import random
from dataclasses import dataclass
from math import log

from bulletserve.core.errors import ConfigError
from bulletserve.workload.request_list import RequestLengths

_USAGE = "a length is a number (512), a range (100-900), or lognormal:MEDIAN:SIGMA (lognormal:800:0.6)"
_MOST = 1_000_000
_WIDEST = 20


@dataclass(frozen=True, slots=True)
class LengthRule:
    """Lengths in tokens within `low` and `high`: all alike often, or lognormal about `median` where that is given."""

    low: int
    high: int
    median: float | None = None
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "LengthRule":
        """Raises `ConfigError`. A lognormal length is within a twentieth and twenty times its median."""
        try:
            if text.startswith("lognormal:"):
                median, sigma = (float(part) for part in text.split(":")[1:])
                rule = cls(max(1, round(median / _WIDEST)), round(median * _WIDEST), median, sigma)
                good = 0 <= sigma <= 5
            else:
                low, _, high = text.partition("-")
                rule = cls(int(low), int(high or low))
                good = True
        except (ValueError, OverflowError):
            raise ConfigError(f"{text!r}: {_USAGE}") from None
        if not (good and 1 <= rule.low <= rule.high <= _MOST):
            raise ConfigError(f"{text!r}: {_USAGE}, from 1 to {_MOST} tokens")
        return rule

    def draw(self, rng: random.Random) -> int:
        """One length."""
        if self.median is None:
            return rng.randint(self.low, self.high)
        return min(self.high, max(self.low, round(rng.lognormvariate(log(self.median), self.sigma))))


def drawn_requests(count: int, prompt: LengthRule, output: LengthRule, seed: int) -> tuple[RequestLengths, ...]:
    """Requests of these lengths, evenly one a second."""
    rng = random.Random(f"lengths {seed}")
    return tuple(RequestLengths(float(number), prompt.draw(rng), output.draw(rng)) for number in range(count))
