"""The rows of the next decode step, with the sums a policy asks for kept up to date.

Knows nothing about blocks or steps that are under way. One pass over the rows when a step starts, no object per
row; the row tuple is the same object until somebody joins or leaves.

Slack without a pass: a row that has g tokens owes its next one at first_token + g * tpot. Every step adds one to
g for all rows, so with n the steps taken so far, `first_token + (g - n) * tpot` never changes after a row joins:
the most pressed row is the top of a heap.
"""

from heapq import heapify, heappop, heappush

from bulletserve.core.slo import NO_DEADLINE_S, Slo
from bulletserve.core.snapshot import ClassLoad
from bulletserve.scheduler.job import Job

_HEAP_SLACK = 64
"""Entries of rows that have left, beyond as many as there are rows, before a heap is cleaned."""


class _SloClass:
    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.rows = 0
        self.tokens = 0
        self.heap: list[tuple[float, int]] = []


class DecodeSet:
    """The jobs that decode, in the order they joined."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._jobs: dict[int, Job] = {}
        self._classes: dict[Slo, _SloClass] = {}
        self._rows: tuple[int, ...] | None = ()
        self._row_jobs: tuple[Job, ...] = ()
        self._steps = 0
        self.blocks_needed = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job.id in self._jobs

    @property
    def rows(self) -> tuple[int, ...]:
        """Seats of all rows; the same object until the set changes."""
        self._refresh()
        assert self._rows is not None
        return self._rows

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Jobs of all rows, in the order of `rows`."""
        self._refresh()
        return self._row_jobs

    def join(self, job: Job, now_s: float) -> None:
        """Add a row whose `kv_tokens` and token counts are projected."""
        self._jobs[job.id] = job
        self._rows = None
        slo = job.request.slo
        slo_class = self._classes.setdefault(slo, _SloClass(slo))
        slo_class.rows += 1
        slo_class.tokens += job.kv_tokens
        self.tokens += job.kv_tokens
        self.blocks_needed += job.kv_tokens % self._block_size == 0
        if slo.tpot_s is not None:
            first_s = now_s if job.first_token_s is None else job.first_token_s
            job.slack_key_s = first_s + (job.generated + job.pending - self._steps) * slo.tpot_s
            heappush(slo_class.heap, (job.slack_key_s, job.id))
            if len(slo_class.heap) > 2 * slo_class.rows + _HEAP_SLACK:
                slo_class.heap = [entry for entry in slo_class.heap if self._is_live(entry)]
                heapify(slo_class.heap)

    def leave(self, job: Job) -> None:
        """Take a row out."""
        del self._jobs[job.id]
        self._rows = None
        slo_class = self._classes[job.request.slo]
        slo_class.rows -= 1
        slo_class.tokens -= job.kv_tokens
        self.tokens -= job.kv_tokens
        self.blocks_needed -= job.kv_tokens % self._block_size == 0
        if not slo_class.rows:
            del self._classes[slo_class.slo]

    def step(self) -> None:
        """Project one more token for every row."""
        self._steps += 1
        needed = 0
        block_size = self._block_size
        for job in self._jobs.values():
            job.kv_tokens += 1
            job.pending += 1
            job.in_flight += 1
            needed += job.kv_tokens % block_size == 0
        self.blocks_needed = needed
        self.tokens += len(self._jobs)
        for slo_class in self._classes.values():
            slo_class.tokens += slo_class.rows

    def loads(self, now_s: float) -> tuple[ClassLoad, ...]:
        """One summary per SLO class that has rows."""
        return tuple(
            ClassLoad(c.slo.name, c.rows, c.tokens, self._least_slack_s(c, now_s)) for c in self._classes.values()
        )

    def _least_slack_s(self, slo_class: _SloClass, now_s: float) -> float:
        heap, tpot_s = slo_class.heap, slo_class.slo.tpot_s
        while heap and tpot_s is not None:
            if self._is_live(heap[0]):
                return heap[0][0] + self._steps * tpot_s - now_s
            heappop(heap)
        return NO_DEADLINE_S

    def _is_live(self, entry: tuple[float, int]) -> bool:
        key_s, request_id = entry
        job = self._jobs.get(request_id)
        return job is not None and job.slack_key_s == key_s

    def _refresh(self) -> None:
        if self._rows is None:
            self._row_jobs = tuple(self._jobs.values())
            self._rows = tuple(job.seat for job in self._row_jobs)
