"""In which order waiting requests are served: a part that every policy takes.

Knows nothing about policies. An ordering is a key over `WaitingEntry`; the queue keeps itself sorted by it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from bulletserve.core.snapshot import WAITING_SHOWN, WaitingEntry

Key = tuple[float, ...]
Ordering = Callable[[WaitingEntry], Key]


def fcfs(entry: WaitingEntry) -> Key:
    """First come, first served, within a priority (lower is sooner)."""
    return (entry.priority, entry.arrival_s, entry.request_id)


class Queue:
    """Waiting entries, sorted. A change costs the logarithm of its length (and a short memory move)."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._keys: list[tuple[Key, int]] = []
        self._entries: dict[int, WaitingEntry] = {}
        self._shown: tuple[WaitingEntry, ...] | None = ()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[WaitingEntry]:
        return (self._entries[request_id] for _, request_id in self._keys)

    def add(self, entry: WaitingEntry) -> None:
        """Put an entry in its place."""
        insort(self._keys, (self._ordering(entry), entry.request_id))
        self._entries[entry.request_id] = entry
        self._shown = None

    def remove(self, request_id: int) -> WaitingEntry:
        """Take an entry out. Raises `KeyError` when it is not there."""
        entry = self._entries.pop(request_id)
        del self._keys[bisect_left(self._keys, (self._ordering(entry), request_id))]
        self._shown = None
        return entry

    def head(self) -> tuple[WaitingEntry, ...]:
        """The first entries, as many as a snapshot shows; the same tuple until the queue changes."""
        if self._shown is None:
            self._shown = tuple([self._entries[request_id] for _, request_id in self._keys[:WAITING_SHOWN]])
        return self._shown
