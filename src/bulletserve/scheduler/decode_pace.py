"""By when the next decode step must end: what the answers' targets leave.

Knows nothing about how steps run.
"""

from typing import NamedTuple

from bulletserve.core.slo import NO_DEADLINE_S
from bulletserve.core.snapshot import Snapshot


class Pace(NamedTuple):
    """`due_s`: from now, the end of the next decode step at which no row's mean falls behind its target. `interval_s`:
    between steps from then on."""

    due_s: float
    interval_s: float


def pace(snapshot: Snapshot, alone_s: float, margin: float) -> Pace:
    """The most pressed class's."""
    interval_s = min((load.tpot_s for load in snapshot.decode_classes), default=NO_DEADLINE_S)
    due_s = min((load.least_slack_s for load in snapshot.decode_classes), default=NO_DEADLINE_S)
    if interval_s >= NO_DEADLINE_S:
        return Pace(NO_DEADLINE_S, 3 * alone_s)
    return Pace(due_s, interval_s * (1.0 - margin))
