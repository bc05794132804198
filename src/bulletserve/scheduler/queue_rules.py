"""How a queue is kept: in which order, and who waits behind whom. Parts that every policy takes.

Knows nothing about policies or the queue itself. An ordering is a key over `WaitingEntry`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import NO_DEADLINE_S
from bulletserve.core.snapshot import WaitingEntry

PATIENCE_S = 10.0
"""A request without a target is ordered by slack as if its first token were due so long after its arrival."""

Key = tuple[float, ...]
Ordering = Callable[[WaitingEntry], Key]


def fcfs(entry: WaitingEntry) -> Key:
    """First come, first served, within a priority (lower is sooner)."""
    return (entry.priority, entry.arrival_s, entry.request_id)


def slack(entry: WaitingEntry) -> Key:
    """Least slack first, within a priority: by the last moment at which the target can still be kept.

    Nobody starves by it: that moment is a constant after arrival for equal prompts, so whoever comes later by more than
    the longest target is behind.
    """
    lost_s = entry.lost_s if entry.lost_s < NO_DEADLINE_S else entry.arrival_s + PATIENCE_S
    return (entry.priority, lost_s, entry.request_id)


ORDERINGS: Mapping[str, Ordering] = {"fcfs": fcfs, "slack": slack}
ADMISSIONS = ("all", "timely", "triage")


class QueueRules(NamedTuple):
    """`ordering`: a name of `ORDERINGS`. `admission`: `all` keeps one queue; with `timely`, who can no longer meet its
    target waits behind those who can; with `triage`, so does who would make others miss theirs (`prompt_order`)."""

    ordering: str = "fcfs"
    admission: str = "all"

    def check(self) -> None:
        """Raise `ConfigError` for a name that there is not."""
        if self.ordering not in ORDERINGS:
            raise ConfigError(f"ordering must be one of {', '.join(ORDERINGS)}, not {self.ordering!r}")
        if self.admission not in ADMISSIONS:
            raise ConfigError(f"admission must be one of {', '.join(ADMISSIONS)}, not {self.admission!r}")


FIRST_COME = QueueRules()
