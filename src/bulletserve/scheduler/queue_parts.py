"""Ordering and admission as options of a policy: the same for all, so that a comparison can hold them equal.

Knows nothing about any particular policy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from bulletserve.core.snapshot import AdmittedEntry, Snapshot, WaitingEntry
from bulletserve.scheduler.outlook import Outlook
from bulletserve.scheduler.policy import Forecaster
from bulletserve.scheduler.prompt_order import PromptOrder, in_given_order, most_in_time
from bulletserve.scheduler.queue_rules import QueueRules


@dataclass(frozen=True, kw_only=True)
class QueueParts:
    """The options that every policy takes: `ordering` (fcfs, slack) and `admission` (all, timely, triage)."""

    ordering: str = "fcfs"
    admission: str = "all"

    def __post_init__(self) -> None:
        self.rules.check()

    @property
    def rules(self) -> QueueRules:
        """How the queue in front of it is kept."""
        return QueueRules(self.ordering, self.admission)

    @property
    def needs_forecasts(self) -> bool:
        """Who will be in time, nobody knows without."""
        return self.admission == "triage"

    def order(self, snapshot: Snapshot, outlook: Outlook) -> PromptOrder:
        """In which order prompts are to be read."""
        arrange = most_in_time if self.admission == "triage" else in_given_order
        return arrange(snapshot, outlook)

    def waiting(self, snapshot: Snapshot, estimator: Forecaster) -> Iterable[WaitingEntry]:
        """Whom to admit, in this order."""
        if self.admission != "triage":
            return chain(snapshot.waiting, snapshot.late)
        return most_in_time(snapshot, Outlook(snapshot, estimator)).waiting

    def admitted(self, snapshot: Snapshot, estimator: Forecaster) -> Sequence[AdmittedEntry]:
        """Whose prompts to read, in this order."""
        if self.admission != "triage":
            return snapshot.admitted
        return tuple(most_in_time(snapshot, Outlook(snapshot, estimator)).admitted)
