"""What a policy is: a pure function from a snapshot to a plan.

Knows nothing about any particular policy, and a policy knows nothing but what the snapshot shows: the same
snapshot gives the same plan, so every decision of a production run can be made again.
"""

from typing import Protocol

from bulletserve.core.plan import Plan
from bulletserve.core.snapshot import Snapshot


class Policy(Protocol):
    """Decides. Must return a plan that `scheduler/plan_check` accepts for the same snapshot."""

    @property
    def name(self) -> str:
        """Its name, as in `--policy`."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """What to start now. Asked again until it has nothing to add, so one thing at a time is enough."""
