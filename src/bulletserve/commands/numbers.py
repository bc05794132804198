"""Numbers as they are typed on a command line. Every option with one is read here (tests/commands/test_numbers).

Knows nothing about options: what a fraction may be beside finite is for the config that takes it, and what a whole
number may be within the bounds of its reader.
"""

from argparse import ArgumentTypeError
from dataclasses import dataclass
from math import inf, isfinite

LOWEST_RATE, HIGHEST_RATE = 0.001, 1e6


@dataclass(frozen=True, slots=True)
class Whole:
    """Reads a whole number from `least` to `most`: every one has bounds, since what no machine can do fails late."""

    least: int
    most: int

    def __call__(self, text: str) -> int:
        """The number."""
        try:
            value = int(text)
        except ValueError:  # also for thousands of digits
            value = self.least - 1
        if not self.least <= value <= self.most:
            raise ArgumentTypeError(f"a whole number from {self.least} to {self.most} is wanted, not {text[:40]!r}")
        return value


MOST_REQUESTS = 10**7
seed = Whole(0, 2**63 - 1)
requests = Whole(1, MOST_REQUESTS)
any_whole = Whole(-(2**63), 2**63 - 1)
"""Where a config has the bounds."""


def number(text: str) -> float:
    """A finite number. `float` takes "nan" and "inf" too, with which every comparison passes or none."""
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number") from None
    if not isfinite(value):
        raise ArgumentTypeError(f"a finite number is wanted, not {text!r}")
    return value


def rate(text: str) -> float:
    """Requests a second."""
    return _rate(text, all_at_once=False)


def rates(text: str) -> tuple[float, ...]:
    """Different rates, such as 8,10,12."""
    return _rates(text, all_at_once=False)


def rates_or_inf(text: str) -> tuple[float, ...]:
    """Different rates, of which one may be inf: all at once."""
    return _rates(text, all_at_once=True)


def rate_each(text: str) -> tuple[float, ...]:
    """A rate for each of several things, which may be equal."""
    return tuple(_rate(word, all_at_once=False) for word in text.split(","))


def _rates(text: str, *, all_at_once: bool) -> tuple[float, ...]:
    found = tuple(_rate(word, all_at_once=all_at_once) for word in text.split(","))
    if len(set(found)) != len(found):
        raise ArgumentTypeError("the same rate is named twice")
    return found


def _rate(text: str, *, all_at_once: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no rate such as 8 or 0.5") from None
    if not (LOWEST_RATE <= value < HIGHEST_RATE or (all_at_once and value == inf)):
        or_inf = ", or inf" if all_at_once else ""
        raise ArgumentTypeError(f"a rate is a number of requests a second, from {LOWEST_RATE} on{or_inf}, not {text}")
    return value
