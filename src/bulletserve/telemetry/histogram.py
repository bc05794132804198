"""A histogram of values, as Prometheus counts them.

Knows nothing about what is counted.
"""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts per bucket and a sum, without locks: for one thread."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus' cumulative buckets."""
        so_far, result = 0, []
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            so_far += count
            result.append((bound, float(so_far)))
        return result
