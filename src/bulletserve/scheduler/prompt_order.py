"""Which prompts next: by deadline, and when not all can be in time, so that as many as possible are.

Knows nothing about partitions. Earliest deadline first keeps all targets whenever that can be done. When it cannot, the
longest prompt that is in the way of the others waits behind them (Moore and Hodgson's rule, which for one machine leaves
the fewest late), and behind it those for whom it is too late. Nobody is refused here, and nobody who has waited for
`PATIENCE_S` more than its target is passed by those who came later than that.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from bulletserve.core.slo import NO_DEADLINE_S
from bulletserve.core.snapshot import AdmittedEntry, Snapshot, WaitingEntry
from bulletserve.scheduler.queue_rules import PATIENCE_S

Entry = WaitingEntry | AdmittedEntry


class PromptOrder(NamedTuple):
    """`in_time`: who will meet its deadline if served in this order, `others`: who will not, in the order in which they
    are served after them. `load`: the largest share of the time up to a deadline that is needed for the work up to it,
    among those in time; 0 where there are no deadlines."""

    in_time: tuple[Entry, ...]
    others: tuple[Entry, ...]
    load: float


def prompt_order(snapshot: Snapshot, token_s: float, busy_s: float) -> PromptOrder:
    """The admitted and the waiting, if a prompt token takes `token_s` and the prefill lane is busy for `busy_s`."""
    entries: list[Entry] = [*snapshot.admitted, *snapshot.waiting]
    entries.sort(key=_due)
    kept: list[tuple[float, int, Entry]] = []
    dropped: list[Entry] = []
    end_s = snapshot.now_s + busy_s
    for number, entry in enumerate(entries):
        seconds = tokens_left(entry) * token_s
        heappush(kept, (-seconds, number, entry))
        end_s += seconds
        while end_s > entry.deadline_s and kept:
            longest_s, _, longest = heappop(kept)
            end_s += longest_s
            dropped.append(longest)
    in_time = tuple([entry for _, _, entry in sorted(kept, key=lambda item: item[1])])
    return PromptOrder(in_time, (*sorted(dropped, key=_due), *snapshot.late), _load(snapshot, in_time, token_s, busy_s))


def tokens_left(entry: Entry) -> int:
    """Prompt tokens still to be read."""
    return entry.prompt_tokens - (entry.computed_tokens if isinstance(entry, AdmittedEntry) else 0)


def _due(entry: Entry) -> tuple[int, float, float]:
    priority = entry.priority if isinstance(entry, WaitingEntry) else 0
    due_s = entry.deadline_s if entry.deadline_s < NO_DEADLINE_S else entry.arrival_s + PATIENCE_S
    return priority, due_s, entry.arrival_s


def _load(snapshot: Snapshot, in_time: Iterable[Entry], token_s: float, busy_s: float) -> float:
    load, work_s = 0.0, busy_s
    for entry in in_time:
        work_s += tokens_left(entry) * token_s
        if entry.deadline_s < NO_DEADLINE_S:
            load = max(load, work_s / max(entry.deadline_s - snapshot.now_s, 1e-6))
    return load
