"""Which prompts next: by deadline, and when not all can be in time, so that as many as possible are.

Knows nothing about partitions. Earliest deadline first keeps all targets whenever that can be done. When it cannot,
the longest prompt in the way of the others waits behind them (Moore's and Hodgson's rule, which leaves the fewest late
on one machine), and behind it those for whom it is too late. They wait only for work that is in time: below full load
there are moments without any, and then they run.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from bulletserve.core.slo import NO_DEADLINE_S
from bulletserve.core.snapshot import MAX_RANGE_TOKENS, AdmittedEntry, Snapshot, WaitingEntry
from bulletserve.scheduler.queue_rules import PATIENCE_S

Entry = WaitingEntry | AdmittedEntry


class PromptOrder(NamedTuple):
    """All prompts that could be next, first those that will be in time if served in this order.

    `load`: the largest share of the time up to a deadline that the work up to it takes, among those in time; 0 where
    there are no deadlines.
    """

    entries: tuple[Entry, ...]
    load: float

    @property
    def admitted(self) -> tuple[AdmittedEntry, ...]:
        """Those that hold their blocks."""
        return tuple([entry for entry in self.entries if isinstance(entry, AdmittedEntry)])

    @property
    def waiting(self) -> tuple[WaitingEntry, ...]:
        """Those that would have to be admitted."""
        return tuple([entry for entry in self.entries if isinstance(entry, WaitingEntry)])


def prompt_order(snapshot: Snapshot, token_s: float, busy_s: float) -> PromptOrder:
    """The order if a prompt token takes `token_s` and the prefill lane is busy for `busy_s`."""
    kept: list[tuple[float, int, Entry]] = []
    dropped: list[Entry] = []
    end_s = snapshot.now_s + busy_s
    entries: list[Entry] = [*snapshot.admitted, *snapshot.waiting]
    for number, entry in enumerate(sorted(entries, key=_due)):
        seconds = tokens_left(entry) * token_s
        heappush(kept, (-seconds, number, entry))
        end_s += seconds
        while kept and end_s > entry.deadline_s:
            longest_s, _, longest = heappop(kept)
            end_s += longest_s
            dropped.append(longest)
    in_time = [entry for _, _, entry in sorted(kept, key=lambda item: item[1])]
    load = _load(snapshot.now_s, in_time, token_s, busy_s)
    return PromptOrder((*in_time, *sorted(dropped, key=_due), *snapshot.late), load)


def tokens_left(entry: Entry) -> int:
    """Prompt tokens still to be read."""
    return entry.prompt_tokens - (entry.computed_tokens if isinstance(entry, AdmittedEntry) else 0)


def next_batch(entries: Sequence[Entry], tokens: int) -> int:
    """How many of the first entries make a batch of at least `tokens` tokens and, more than one, at most twice as many:
    a prompt gains nothing from waiting for others once the device is busy."""
    have = 0
    for number, entry in enumerate(entries):
        left = min(tokens_left(entry), MAX_RANGE_TOKENS)
        if have >= tokens or (number and have + left > 2 * tokens):
            return number
        have += left
    return len(entries)


def _due(entry: Entry) -> tuple[int, float, float]:
    priority = entry.priority if isinstance(entry, WaitingEntry) else 0
    due_s = entry.deadline_s if entry.deadline_s < NO_DEADLINE_S else entry.arrival_s + PATIENCE_S
    return priority, due_s, entry.arrival_s


def _load(now_s: float, in_time: Iterable[Entry], token_s: float, busy_s: float) -> float:
    load, work_s = 0.0, busy_s
    for entry in in_time:
        work_s += tokens_left(entry) * token_s
        if entry.deadline_s < NO_DEADLINE_S:
            load = max(load, work_s / (entry.deadline_s - now_s))
    return load
