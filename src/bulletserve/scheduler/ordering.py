"""Requests that wait, in the order in which they are to be served.

Knows nothing about policies. A `Line` keeps itself sorted by an ordering; a `Queue` is one line, or two where those
who can no longer meet their target wait behind those who can.
"""

from bisect import bisect_left
from collections.abc import Iterator
from heapq import heappop, heappush

from bulletserve.core.slo import NO_DEADLINE_S
from bulletserve.core.snapshot import WAITING_SHOWN, WaitingEntry
from bulletserve.scheduler.queue_rules import ORDERINGS, Key, Ordering, QueueRules, fcfs


class Line:
    """Waiting entries, sorted by keys that are all different. A change costs the logarithm of its length (and a short
    memory move). `tokens`: what all prompts in it have left."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._keys: list[Key] = []
        self._sorted: list[WaitingEntry] = []
        self._entries: dict[int, WaitingEntry] = {}
        self._shown: tuple[WaitingEntry, ...] | None = ()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def __getitem__(self, request_id: int) -> WaitingEntry:
        return self._entries[request_id]

    def __iter__(self) -> Iterator[WaitingEntry]:
        return iter(self._sorted)

    def add(self, entry: WaitingEntry) -> None:
        """Put an entry in its place."""
        key = self._ordering(entry)
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self._sorted.insert(place, entry)
        self._entries[entry.request_id] = entry
        self.tokens += entry.tokens_left
        self._shown = None

    def remove(self, request_id: int) -> WaitingEntry:
        """Take an entry out. Raises `KeyError` when it is not there."""
        entry = self._entries.pop(request_id)
        place = bisect_left(self._keys, self._ordering(entry))
        del self._keys[place], self._sorted[place]
        self.tokens -= entry.tokens_left
        self._shown = None
        return entry

    def head(self) -> tuple[WaitingEntry, ...]:
        """The first entries, as many as a snapshot shows; the same tuple until the queue changes."""
        if self._shown is None:
            self._shown = tuple(self._sorted[:WAITING_SHOWN])
        return self._shown


class Queue:
    """Those who can still meet their target (`in_time`), and those who cannot (`late`, first come, first served).

    A request whose next token is overdue because it was preempted stays in time: somebody is reading.
    """

    def __init__(self, rules: QueueRules) -> None:
        self._divides = rules.admission != "all"
        self.in_time = Line(ORDERINGS[rules.ordering])
        self.late = Line(fcfs)
        self._lost: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self.in_time) + len(self.late)

    @property
    def tokens(self) -> int:
        """Prompt tokens that all who wait have left."""
        return self.in_time.tokens + self.late.tokens

    def add(self, entry: WaitingEntry) -> None:
        """Put an entry in its place among those in time."""
        self.in_time.add(entry)
        if self._divides and entry.lost_s < NO_DEADLINE_S and not entry.preempted:
            heappush(self._lost, (entry.lost_s, entry.request_id))

    def remove(self, request_id: int) -> None:
        """Take an entry out. Raises `KeyError` when it is not there."""
        (self.in_time if request_id in self.in_time else self.late).remove(request_id)

    def discard(self, request_id: int) -> None:
        """Take an entry out if it is there: it is not where a forecast failed as the request was to be queued."""
        for line in (self.in_time, self.late):
            if request_id in line:
                line.remove(request_id)

    def divide(self, now_s: float) -> None:
        """Whose target is lost goes to the late."""
        while self._lost and self._lost[0][0] < now_s:
            lost_s, request_id = heappop(self._lost)
            if request_id in self.in_time and self.in_time[request_id].lost_s == lost_s:
                self.late.add(self.in_time.remove(request_id))
