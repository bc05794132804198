"""Which prompts next: by deadline, and when not all can be in time, so that as many as possible are.

Knows nothing about partitions. Earliest deadline first keeps all targets whenever that can be done. When it cannot,
the longest prompt in the way of the others waits behind them (Moore's and Hodgson's rule, which leaves the fewest late
on one machine), and behind it those for whom it is too late. They wait only for work that is in time: below full load
there are moments without any, and then they run. Where there is no such moment for long, they have one in each second.
A long prompt with time to spare lets shorter ones pass.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from bulletserve.core.slo import NO_DEADLINE_S
from bulletserve.core.snapshot import MAX_RANGE_TOKENS, AdmittedEntry, Snapshot, WaitingEntry
from bulletserve.scheduler.outlook import Outlook
from bulletserve.scheduler.queue_rules import PATIENCE_S

PREFILL_SPEED = 0.9
"""Part of the device's speed that prompts are taken to get while answers run."""

GIVES_WAY = 0.5
"""A prompt of more than one token range lets shorter ones pass while it will end within this part of the time up to its
deadline: they wait for a range of it instead of for all."""

TURN_EVERY_S = 1.0
TURN_S = 0.125
"""Who has been overdue for longer than the patience goes before others of its priority in so much of every second: a
batch or two."""

Entry = WaitingEntry | AdmittedEntry

_Place = tuple[int, float, int, float, float, Entry]
"""Priority, when it is due, number, seconds of work, deadline, entry."""


class PromptOrder(NamedTuple):
    """All prompts that could be next, first those that will be in time if served in this order.

    `load`: the largest share of the time up to a deadline that the work up to it takes, among those in time; 0 where
    there are no deadlines.
    """

    entries: tuple[Entry, ...]
    load: float

    @property
    def admitted(self) -> Iterator[AdmittedEntry]:
        """Those that hold their blocks."""
        return (entry for entry in self.entries if isinstance(entry, AdmittedEntry))

    @property
    def waiting(self) -> Iterator[WaitingEntry]:
        """Those that would have to be admitted."""
        return (entry for entry in self.entries if isinstance(entry, WaitingEntry))


def in_given_order(snapshot: Snapshot, outlook: Outlook) -> PromptOrder:
    """The admitted, then the waiting as the queue has them, then the late."""
    token_s = _token_s(outlook)
    load, work_s = 0.0, outlook.prefill_left_s
    entries: list[Entry] = [*snapshot.admitted, *snapshot.waiting]
    for entry in entries:
        work_s += entry.tokens_left * token_s
        left_s = entry.deadline_s - snapshot.now_s
        load = max(load, work_s / left_s if left_s > 0 else 0.0)
    return PromptOrder((*snapshot.admitted, *snapshot.waiting, *snapshot.late), load)


def most_in_time(snapshot: Snapshot, outlook: Outlook) -> PromptOrder:
    """By deadline, and so that the fewest are late."""
    token_s, now_s = _token_s(outlook), snapshot.now_s
    free_s = now_s + outlook.prefill_left_s
    queue: list[_Place] = []
    longest = 0
    for begun in snapshot.admitted:
        number, arrival_s, tokens, computed, deadline_s, _, _ = begun
        due_s = deadline_s if deadline_s < NO_DEADLINE_S else arrival_s + PATIENCE_S
        left = tokens - computed
        if left > longest:
            longest = left
        queue.append((0, due_s, number, left * token_s, deadline_s, begun))
    for new in snapshot.waiting:
        number, arrival_s, tokens, _, deadline_s, _, priority, _, _, _, cached = new
        due_s = deadline_s if deadline_s < NO_DEADLINE_S else arrival_s + PATIENCE_S
        left = tokens - cached
        if left > longest:
            longest = left
        queue.append((priority, due_s, number, left * token_s, deadline_s, new))
    queue.sort()  # numbers of requests are unique: entries themselves are never compared
    in_time: list[_Place] = queue
    dropped: list[_Place] = []
    end_s = free_s
    for _, _, _, seconds, deadline_s, _ in queue:
        end_s += seconds
        if end_s > deadline_s:
            in_time, dropped = _most_in_time(queue, free_s)
            break
    load, work_s = 0.0, free_s - now_s
    for _, _, _, seconds, deadline_s, _ in in_time:
        work_s += seconds
        if work_s > load * (deadline_s - now_s):
            load = work_s / (deadline_s - now_s)
    if longest > MAX_RANGE_TOKENS:
        in_time = _let_pass(in_time, free_s, now_s)
    ahead, behind = [place[-1] for place in in_time], [*[place[-1] for place in dropped], *snapshot.late]
    if behind and now_s % TURN_EVERY_S < TURN_S:
        overdue = [entry for entry in behind if _due_s(entry) + PATIENCE_S < now_s]
        behind = [entry for entry in behind if not _due_s(entry) + PATIENCE_S < now_s]
        ahead = sorted([*overdue, *ahead], key=_priority)
    return PromptOrder((*ahead, *behind), load)


def _due_s(entry: Entry) -> float:
    """The deadline, or when the patience of a request without one ends."""
    return entry.deadline_s if entry.deadline_s < NO_DEADLINE_S else entry.arrival_s + PATIENCE_S


def _priority(entry: Entry) -> int:
    """Lower is sooner; whoever holds blocks has the usual one."""
    return entry.priority if isinstance(entry, WaitingEntry) else 0


def _most_in_time(queue: list[_Place], free_s: float) -> tuple[list[_Place], list[_Place]]:
    """Those of a queue, sorted by deadline, that are in time if the others give way, and the others."""
    longest: list[tuple[float, int]] = []
    kept, end_s = set(range(len(queue))), free_s
    for number, (_, _, _, seconds, deadline_s, _) in enumerate(queue):
        heappush(longest, (-seconds, number))
        end_s += seconds
        while end_s > deadline_s and longest:
            less_s, dropped = heappop(longest)
            end_s += less_s
            kept.remove(dropped)
    return [p for n, p in enumerate(queue) if n in kept], [p for n, p in enumerate(queue) if n not in kept]


def _let_pass(queue: list[_Place], free_s: float, now_s: float) -> list[_Place]:
    """A queue, sorted by deadline, in which the long prompts have given way to shorter ones of their priority."""
    order, end_s = list(queue), free_s + sum(place[3] for place in queue)
    for first in range(len(order) - 1, -1, -1):
        priority, due_s, _, seconds, _, entry = long = order[first]
        last_s = end_s
        end_s -= seconds
        if entry.tokens_left <= MAX_RANGE_TOKENS:
            continue
        to, limit_s = first, now_s + GIVES_WAY * (due_s - now_s)
        while to + 1 < len(order):
            other = order[to + 1]
            last_s += other[3]
            if other[0] != priority or other[3] >= seconds or last_s > limit_s:
                break
            order[to] = other
            to += 1
        order[to] = long
    return order


def _token_s(outlook: Outlook) -> float:
    return outlook.token_s / PREFILL_SPEED


def next_batch(entries: Sequence[Entry], tokens: int) -> int:
    """How many of the first entries make a batch of at least `tokens` tokens and, more than one, at most twice as many:
    a prompt gains nothing from waiting for others once the device is busy."""
    have = 0
    for number, entry in enumerate(entries):
        left = min(entry.tokens_left, MAX_RANGE_TOKENS)
        if have >= tokens or (number and have + left > 2 * tokens):
            return number
        have += left
    return len(entries)
