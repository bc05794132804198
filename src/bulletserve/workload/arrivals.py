"""When requests arrive: recorded, evenly, or drawn (Poisson, gamma), always one a second in the mean.

Knows nothing about rates (`request_list.at_rate` divides by one) or lengths. The same seed gives the same gaps on every
machine. Poisson gaps are exponential: their coefficient of variation is 1. Gamma gaps of a coefficient above 1 come in
bursts, below 1 they are more even; of 1 they are a Poisson process, of 0 all gaps would be equal.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bulletserve.core.errors import ConfigError
from bulletserve.workload.request_list import RequestLengths, with_new_gaps

RECORDED, POISSON, GAMMA, EVEN = "recorded", "poisson", "gamma", "even"
_USAGE = "arrivals are recorded, even, poisson, or gamma:CV with the gaps' coefficient of variation, such as gamma:2"
_MOST_VARIATION = 20.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A kind of arrivals. `variation`: standard deviation of the gaps over their mean, of gamma alone."""

    kind: str
    variation: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "Arrivals":
        """`recorded`, `even`, `poisson` or `gamma:CV`. Raises `ConfigError`."""
        kind, _, number = text.partition(":")
        if kind in (RECORDED, EVEN, POISSON) and not number:
            return cls(kind)
        try:
            variation = float(number)
        except ValueError:
            variation = 0.0
        if kind != GAMMA or not 0.05 <= variation <= _MOST_VARIATION:
            raise ConfigError(f"{text!r}: {_USAGE} (0.05 to {_MOST_VARIATION:g})")
        return cls(kind, variation)

    def describe(self) -> str:
        """As it is written."""
        return f"{GAMMA}:{self.variation:g}" if self.kind == GAMMA else self.kind

    def arrange(self, requests: Sequence[RequestLengths], seed: int) -> tuple[RequestLengths, ...]:
        """The requests in their order, arriving in this way at one a second in the mean; recorded ones are as given."""
        if self.kind == RECORDED:
            return tuple(requests)
        if self.kind == EVEN:
            return tuple(replace(one, arrival_s=float(number)) for number, one in enumerate(requests))
        if self.kind == POISSON:
            return with_new_gaps(requests, seed)
        rng, arrival_s, shape = random.Random(f"gamma {seed}"), 0.0, self.variation**-2
        found = []
        for one in requests:
            arrival_s += rng.gammavariate(shape, 1 / shape)
            found.append(replace(one, arrival_s=arrival_s))
        return tuple(found)


def recorded_rate(requests: Sequence[RequestLengths]) -> float:
    """Requests a second as recorded: gaps over the time that they take. Raises `ConfigError` where that is none."""
    times = [one.arrival_s for one in requests]
    span_s = max(times) - min(times) if times else 0.0
    if not span_s:
        raise ConfigError("the recorded arrivals are all at one moment: name other --arrivals, such as poisson")
    return (len(times) - 1) / span_s


def one_a_second(requests: Sequence[RequestLengths]) -> tuple[RequestLengths, ...]:
    """Recorded requests on a clock on which they arrive one a second in the mean, the first at 0."""
    rate = recorded_rate(requests)
    first_s = min(one.arrival_s for one in requests)
    return tuple(replace(one, arrival_s=(one.arrival_s - first_s) * rate) for one in requests)
