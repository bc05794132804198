"""Counts rounded to a geometric grid, so that forecasts of nearly the same step are one forecast.

Knows nothing about forecasts. A number keeps its leading binary digits: neighbours on the grid differ by 1.6 to 3.1 %,
small numbers are exact, and a greater number never rounds to a smaller one. What is rounded first cannot depend on what
was asked before, so the memo behind it is invisible.
"""

_DIGITS = 6  # leading binary digits kept: steps of 1/64 to 1/32


def near(count: int) -> int:
    """The nearest number on the grid (halves up)."""
    shift = count.bit_length() - _DIGITS
    if shift <= 0:
        return count
    return (count + (1 << shift - 1)) >> shift << shift


def above(count: int) -> int:
    """The least number on the grid that is not below `count`: for rows, because tiles are filled up."""
    shift = count.bit_length() - _DIGITS
    if shift <= 0:
        return count
    return -(-count >> shift) << shift
