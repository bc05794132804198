"""What the two lanes did: how long both were busy at once, and the longest gap of a running stream.

Knows nothing about requests. A gap is the time between the ends of two successive steps with decode rows while
rows stayed; an idle engine has none.
"""

from collections import deque

from bulletserve.core.plan import Lane

_KEPT = 64
GAP_WINDOW_S = 60.0
"""The window of `longest_gap_s`."""


class LaneTimes:
    """Fed with each finished step, in the order in which steps finish."""

    def __init__(self) -> None:
        self.both_busy_s = 0.0
        self.busy_s = {Lane.PREFILL: 0.0, Lane.DECODE: 0.0}
        self._intervals: dict[Lane, deque[tuple[float, float]]] = {lane: deque(maxlen=_KEPT) for lane in Lane}
        self._last_tokens_s: float | None = None
        self._gaps: deque[tuple[float, float]] = deque()

    def observe(self, lane: Lane, started_s: float, finished_s: float, has_rows: bool) -> None:
        """A step ran on a lane from `started_s` to `finished_s`; `has_rows`: it carried decode rows."""
        self.busy_s[lane] += finished_s - started_s
        other = Lane.DECODE if lane is Lane.PREFILL else Lane.PREFILL
        for start, end in reversed(self._intervals[other]):
            if end <= started_s:
                break
            self.both_busy_s += max(0.0, min(end, finished_s) - max(start, started_s))
        self._intervals[lane].append((started_s, finished_s))
        if has_rows:
            if self._last_tokens_s is not None:
                self._add_gap(finished_s, finished_s - self._last_tokens_s)
            self._last_tokens_s = finished_s

    def pause(self) -> None:
        """No row is left: the time to the next step is no gap."""
        self._last_tokens_s = None

    def longest_gap_s(self, now_s: float) -> float:
        """The longest gap that ended within the last `GAP_WINDOW_S` seconds."""
        while self._gaps and self._gaps[0][0] < now_s - GAP_WINDOW_S:
            self._gaps.popleft()
        return self._gaps[0][1] if self._gaps else 0.0

    def _add_gap(self, ended_s: float, gap_s: float) -> None:
        while self._gaps and self._gaps[-1][1] <= gap_s:
            self._gaps.pop()
        self._gaps.append((ended_s, gap_s))
