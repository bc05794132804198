"""What to know when cache blocks run out: who may be preempted, and what comes back anyway.

Knows nothing about policies, which choose. Looked at only then, so it may cost something per row.
"""

from collections.abc import Collection, Iterable
from heapq import nlargest

from bulletserve.core.snapshot import VICTIMS_SHOWN, Victim
from bulletserve.scheduler.decode_set import DecodeSet
from bulletserve.scheduler.job import Job
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.started_step import StartedStep


def cheapest_victims(rows: DecodeSet, admitted: Collection[Job], ledger: KvLedger) -> tuple[Victim, ...]:
    """The last to arrive of those that decode or wait for their batch, never the first of all."""
    candidates = [*rows.jobs, *admitted]
    latest = nlargest(
        min(VICTIMS_SHOWN, len(candidates) - 1),
        candidates,
        key=lambda job: (job.request.priority, job.request.arrival_s, job.id),
    )
    return tuple(Victim(job.id, len(ledger.held(job.id)), rows.is_due(job), job in rows) for job in latest)


def returning_blocks(steps: Iterable[StartedStep], rows: DecodeSet, ledger: KvLedger) -> int:
    """Blocks of those that are in no further step, known ahead of the step that lets them go."""
    gone: set[int] = set()
    for step in steps:
        gone.update(job.id for job in step.leaving)
        gone.update(job.id for job in step.drawn if job.is_full and job not in rows)
    return sum(len(ledger.held(request_id)) for request_id in gone)
