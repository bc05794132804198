"""How long answers are at least, as a rule: learned from those that have ended.

Knows nothing about requests. A sorted window of the last answers, and its first decile.
"""

from bisect import bisect_left, insort
from collections import deque

_REMEMBERED = 100
_SHORTER = 0.1


class AnswerLengths:
    """`short_tokens`: a length that nine of ten of the last answers reached; 0 before the first has ended."""

    def __init__(self) -> None:
        self._last: deque[int] = deque()
        self._sorted: list[int] = []

    @property
    def short_tokens(self) -> int:
        """The first decile."""
        return self._sorted[int(_SHORTER * len(self._sorted))] if self._sorted else 0

    def add(self, tokens: int) -> None:
        """An answer has ended after so many tokens."""
        if len(self._last) == _REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]
        self._last.append(tokens)
        insort(self._sorted, tokens)
