"""Numbers as they are typed on a command line. Every option with a fraction is read here (tests/commands/test_numbers).

Knows nothing about options: what a number may be beside finite is for the config that takes it.
"""

from argparse import ArgumentTypeError
from math import inf, isfinite

LOWEST_RATE, HIGHEST_RATE = 0.001, 1e6


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
