"""Finds stop strings in text that arrives in pieces, without ever letting a part of one pass.

Knows nothing about tokens. For each stop string it keeps how many of its characters the text ends with (Knuth,
Morris and Pratt), so a character costs the same however long the answer is, and what must be held back is known at
once: the longest of those beginnings. The first match to be *complete* wins; of two that end at the same character
the longer. That makes the result a property of the text alone, not of how it was cut into tokens.
"""

from collections.abc import Sequence


class StopStrings:
    """The search through one answer. `matched` is the stop string that was found; `keep`: it is shown."""

    __slots__ = ("_fallbacks", "_first", "_held", "_keep", "_states", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._keep = keep
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._first = frozenset(stop[0] for stop in stops)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that can be shown now that `text` has followed. After a match: the rest before it, then nothing."""
        if self.matched is not None:
            return ""
        if not self._held and self._first.isdisjoint(text):
            return text
        buffer = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            for number, stop in enumerate(self._stops):
                state, fallback = self._states[number], self._fallbacks[number]
                while state and stop[state] != character:
                    state = fallback[state]
                if stop[state] == character:
                    state += 1
                if state == len(stop):
                    self.matched, self._held = stop, ""
                    return buffer[: end if self._keep else end - len(stop)]
                self._states[number] = state
        shown = len(buffer) - max(self._states)
        self._held = buffer[shown:]
        return buffer[:shown]

    def rest(self) -> str:
        """What is still held back, once nothing will follow."""
        held, self._held = self._held, ""
        return held


def _fallbacks(stop: str) -> list[int]:
    """For each length of a beginning, the length of the next shorter one that it ends with."""
    table = [0] * len(stop)
    length = 0
    for end in range(1, len(stop)):
        table[end] = length
        while length and stop[end] != stop[length]:
            length = table[length]
        if stop[end] == stop[length]:
            length += 1
    return table
