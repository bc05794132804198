"""What was computed last. Knows nothing about what that is.

A dict that is emptied when it is full stops everybody for as long as tens of thousands of objects take to free; this
one forgets an entry for each that it takes in.
"""

from collections import deque
from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class Memo(dict[_K, _V]):
    """The `most` values that were added last, by their keys. Values come in by `add` only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: deque[_K] = deque()

    def add(self, key: _K, value: _V) -> None:
        """Remember a value, which may replace another of the same key; the oldest gives way."""
        if key not in self:
            if len(self._keys) >= self._most:
                del self[self._keys.popleft()]
            self._keys.append(key)
        self[key] = value
