"""How long a queue will take: what waits, divided by the rate at which requests end while others wait.

Knows nothing about engines or clocks: times are handed in. Ends that are seen while nobody waits say how often requests
come, not how fast they could be served, so an observation begins when somebody begins to wait and is over when nobody
does. It counts once as many requests have ended as are running: until then those that were begun together have not had
their time, and the rate would be too low by any factor. What is older than two to four minutes is forgotten.
"""

LEAST_ENDS = 16
"""Fewer ends than this say nothing about a rate."""

PERIOD_S = 120.0


class EndRate:
    """The ends of requests as they happen. A few additions an end, nothing a token."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # somebody has waited from then on; the observation's start
        self._period_s = 0.0  # when the younger of its two periods began
        self._older_ends = self._ends = 0
        self._known_per_s = 0.0

    def waiting(self, count: int, now_s: float) -> None:
        """So many requests wait from now on."""
        if count and self._since_s is None:
            self._since_s = self._period_s = now_s
            self._older_ends = self._ends = 0
        elif not count:
            self._since_s = None

    def ended(self, running: int, now_s: float) -> None:
        """A request that was being served has ended; so many still are."""
        if self._since_s is None:
            return
        self._ends += 1
        rate = self._per_s(running, now_s)
        if rate:
            self._known_per_s = rate
        if now_s - self._period_s >= PERIOD_S and self._ends >= max(running, LEAST_ENDS):
            self._since_s, self._period_s = self._period_s, now_s
            self._older_ends, self._ends = self._ends, 0

    def wait_s(self, waiting: int, running: int, now_s: float, forecast_s: float) -> float:
        """When `waiting` requests will have been served. Finite, and longer the longer nothing ends.

        While too few have ended, by the rate of the last time that there was one, or else `forecast_s`; but no less
        than they have waited already.
        """
        rate = self._per_s(running, now_s)
        if rate:
            return waiting / rate
        guess_s = waiting / self._known_per_s if self._known_per_s else forecast_s
        return guess_s if self._since_s is None else max(guess_s, now_s - self._since_s)

    def _per_s(self, running: int, now_s: float) -> float:
        """Requests that end a second; 0 while that cannot be said."""
        ends = self._older_ends + self._ends
        if self._since_s is None or now_s <= self._since_s or ends < max(running, LEAST_ENDS):
            return 0.0
        return ends / (now_s - self._since_s)
