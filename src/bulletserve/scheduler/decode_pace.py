"""The pace of the running answers: by when the next decode step must end, and how long steps may take.

Knows nothing about how steps run. TPOT is a mean over an answer, so a row that has been fast may pause (its slack), and
one that is behind may catch up later: within the answer where answers are short, in a quiet moment where they are so
long that they outlast a burst of prompts.
"""

from typing import NamedTuple

from bulletserve.core.slo import NO_DEADLINE_S
from bulletserve.core.snapshot import Snapshot

BURST_S = 0.25
"""How long prompts keep coming at most before there is a quiet moment again."""

DEBT_SHARE = 0.1
MOST_DEBT_TOKENS = 8
"""How far a row may fall behind for prompts at risk, where answers outlast a burst: a part of a short answer, and so
many tokens at most."""

DEBT_AT_ONCE = 1.5
"""Tokens of a debt that are made up for at once, where answers are short."""

FASTEST = 0.7
"""Nobody catches up by steps of less than this part of the target."""

FREE_PACE = 4.0
"""Without any target, a decode step may take so many times what it takes alone."""

BACKLOG_PACE = 20.0
"""The same while so many prompts wait that it is throughput that counts."""


class Pace(NamedTuple):
    """Seconds. `interval_s`: between steps, to keep the targets. `due_s`: from now, when the next step must have ended
    so that nobody falls behind. `limit_s`: the longest step for now. `allowance_s`: how much later than due a step may
    be for the sake of prompts at risk."""

    interval_s: float
    due_s: float
    limit_s: float
    allowance_s: float


def target_s(snapshot: Snapshot) -> float:
    """The least TPOT target of the running answers; `NO_DEADLINE_S` where none has one."""
    return min((load.tpot_s for load in snapshot.decode_classes), default=NO_DEADLINE_S)


def pace(snapshot: Snapshot, alone_s: float, starts_s: float, margin: float, *, backlog: bool = False) -> Pace:
    """What the most pressed class leaves for a step that begins in `starts_s`; alone it takes `alone_s`."""
    least_s = target_s(snapshot)
    if least_s >= NO_DEADLINE_S:
        interval_s = (BACKLOG_PACE if backlog else FREE_PACE) * alone_s
        return Pace(interval_s, interval_s, interval_s, 0.0)
    interval_s = least_s * (1.0 - margin)
    due_s = min(load.least_slack_s for load in snapshot.decode_classes)
    if snapshot.answer_tokens * interval_s >= BURST_S:
        debt_tokens = min(DEBT_SHARE * snapshot.answer_tokens, MOST_DEBT_TOKENS)
        return Pace(interval_s, due_s, interval_s, debt_tokens * interval_s)
    behind = min(max(0.0, 1.0 - (due_s - starts_s) / interval_s), DEBT_AT_ONCE)
    catching_up = max(FASTEST, 1.0 - behind / max(snapshot.answer_tokens, 1))
    return Pace(interval_s, due_s, interval_s * catching_up, 0.0)
