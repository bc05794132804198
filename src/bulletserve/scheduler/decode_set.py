"""The rows of the next decode step, with the sums a policy asks for kept up to date.

Knows nothing about blocks or steps that are under way. A step costs nothing per row: every row gets one token, so
whatever will happen to a row is written down once, by the number of the step, when it joins. The row tuple is the
same object until somebody joins or leaves.

- A row with k cached tokens begins a block at every step whose number is congruent to -k: `_due`, one set of rows per
  residue.
- A row is full after as many steps as it has tokens to go: `_full_at`.
- A row that has g tokens owes its next one at first_token + g * tpot. With n the steps taken so far,
  `first_token + (g - n) * tpot` never changes once its first token is told: the most pressed row is the first of a
  sorted list. Rows too far behind to catch up are passed over, so that they do not hold back all others.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection

from bulletserve.core.slo import NO_DEADLINE_S, Slo
from bulletserve.core.snapshot import ClassLoad
from bulletserve.scheduler.job import Job

LOST_TOKENS = 16
"""A row that is so many tokens behind its target is not waited for: its class's slack is that of the others."""


class _SloClass:
    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.rows = 0
        self.tokens = 0
        self.slacks: list[tuple[float, int]] = []


class DecodeSet:
    """The jobs that decode, in the order they joined."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._jobs: dict[int, Job] = {}
        self._due: tuple[dict[int, Job], ...] = tuple({} for _ in range(block_size))
        self._full_at: dict[int, dict[int, Job]] = {}
        self._classes: dict[Slo, _SloClass] = {}
        self._seats: dict[int, int] = {}
        self._at_seat: list[Job | None] = []
        self._turn = 0
        self._rows: tuple[int, ...] | None = ()
        self._row_jobs: tuple[Job, ...] = ()
        self._row_ids: tuple[int, ...] = ()
        self._steps = 0
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

    @property
    def ids(self) -> tuple[int, ...]:
        """Requests of all rows, in the order of `rows`."""
        self._refresh()
        return self._row_ids

    @property
    def due(self) -> Collection[Job]:
        """Rows whose next step begins a block."""
        return self._due[self._steps % self._block_size].values()

    @property
    def blocks_needed(self) -> int:
        """Blocks that the next step begins."""
        return len(self.due)

    def is_due(self, job: Job) -> bool:
        """Whether it is a row whose next step begins a block."""
        return job.id in self._due[self._steps % self._block_size]

    def join(self, job: Job, now_s: float) -> None:
        """Add a row, not full yet, whose `kv_tokens` is projected."""
        self._jobs[job.id] = job
        self._seats[job.id] = job.seat
        self._at_seat += [None] * (job.seat + 1 - len(self._at_seat))
        self._at_seat[job.seat] = job
        self._rows = None
        job.joined_at = self._steps
        self._due_of(job)[job.id] = job
        self._full_at.setdefault(self._full_step(job), {})[job.id] = job
        slo = job.request.slo
        slo_class = self._classes.get(slo)
        if slo_class is None:
            slo_class = self._classes[slo] = _SloClass(slo)
        slo_class.rows += 1
        slo_class.tokens += job.kv_tokens
        self.tokens += job.kv_tokens
        if slo.tpot_s is not None:
            self._note_slack(slo_class, job, now_s if job.first_token_s is None else job.first_token_s)

    def spoke(self, job: Job, now_s: float) -> None:
        """A row that joined before its first token was told, told it now: that is what counts."""
        slo_class = self._classes[job.request.slo]
        if slo_class.slo.tpot_s is not None:
            self._forget_slack(slo_class, job)
            self._note_slack(slo_class, job, now_s)

    def leave(self, job: Job) -> None:
        """Take a row out."""
        del self._jobs[job.id], self._seats[job.id]
        self._at_seat[job.seat] = None
        self._rows = None
        del self._due_of(job)[job.id]
        full_step = self._full_step(job)
        del self._full_at[full_step][job.id]
        if not self._full_at[full_step]:
            del self._full_at[full_step]
        job.kv_tokens += self._steps - job.joined_at
        slo_class = self._classes[job.request.slo]
        slo_class.rows -= 1
        slo_class.tokens -= job.kv_tokens
        self.tokens -= job.kv_tokens
        if slo_class.slo.tpot_s is not None:
            self._forget_slack(slo_class, job)
        if not slo_class.rows:
            del self._classes[slo_class.slo]

    def step(self) -> tuple[Job, ...]:
        """Project one more token for every row. The rows that are full now, which must leave."""
        self._steps += 1
        self.tokens += len(self._jobs)
        for slo_class in self._classes.values():
            slo_class.tokens += slo_class.rows
        return tuple(self._full_at.get(self._steps, {}).values())

    def next_in_turn(self, rounds: int) -> list[Job]:
        """The rows whose turn it is: each row once in so many calls, by its seat, so about as many at every call."""
        self._turn = (self._turn + 1) % rounds
        return [job for job in self._at_seat[self._turn :: rounds] if job is not None]

    def loads(self, now_s: float) -> tuple[ClassLoad, ...]:
        """One summary per SLO class that has rows."""
        return tuple(
            [
                ClassLoad(
                    c.slo.name,
                    c.rows,
                    c.tokens,
                    self._least_slack_s(c, now_s),
                    NO_DEADLINE_S if c.slo.tpot_s is None else c.slo.tpot_s,
                )
                for c in self._classes.values()
            ]
        )

    def _least_slack_s(self, slo_class: _SloClass, now_s: float) -> float:
        tpot_s, slacks = slo_class.slo.tpot_s, slo_class.slacks
        if tpot_s is None:
            return NO_DEADLINE_S
        since_s = self._steps * tpot_s - now_s
        first = bisect_right(slacks, (-since_s - LOST_TOKENS * tpot_s, -1))
        return slacks[first][0] + since_s if first < len(slacks) else NO_DEADLINE_S

    def _note_slack(self, slo_class: _SloClass, job: Job, first_s: float) -> None:
        generated = job.kv_tokens + 1 - job.prompt_tokens  # as it joined: what it has got since is counted by steps
        job.slack_key_s = first_s + (generated - job.joined_at) * (slo_class.slo.tpot_s or 0.0)
        insort(slo_class.slacks, (job.slack_key_s, job.id))

    def _forget_slack(self, slo_class: _SloClass, job: Job) -> None:
        del slo_class.slacks[bisect_left(slo_class.slacks, (job.slack_key_s, job.id))]

    def _due_of(self, job: Job) -> dict[int, Job]:
        return self._due[(job.joined_at - job.kv_tokens) % self._block_size]

    def _full_step(self, job: Job) -> int:
        return job.joined_at + job.most_tokens - 1 - job.kv_tokens

    def _refresh(self) -> None:
        if self._rows is None:
            self._row_jobs = tuple(self._jobs.values())
            self._row_ids = tuple(self._jobs)
            self._rows = tuple(self._seats.values())
