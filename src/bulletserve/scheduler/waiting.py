"""The queue, and how much of each waiting prompt the prefix cache has.

Knows nothing about policies. A prompt is looked up when it joins the queue, and again when the first of its blocks that
was not there is named: then somebody has computed more of the same prefix. Blocks that are given up tell nobody; an
admission that finds less than was expected has all others looked up again. So an entry is what was there when it was
last looked up: a good guess, and the admission itself looks for certain.

Each look-up walks over the prompt's names, so few are made at once, however many wait for the same prefix.
"""

from itertools import islice

from bulletserve.core.correction import Correction
from bulletserve.core.slo import NO_DEADLINE_S
from bulletserve.core.snapshot import Limits
from bulletserve.scheduler.forecasts import prompt_s
from bulletserve.scheduler.job import Job
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.ordering import Queue
from bulletserve.scheduler.policy import Forecaster
from bulletserve.scheduler.queue_rules import QueueRules

AT_ONCE = 4
"""Prompts that are looked up again when a step has ended."""


class Waiting:
    """Jobs in the `queue`. Without an `estimator` a target is lost when its deadline is past."""

    def __init__(self, rules: QueueRules, limits: Limits, ledger: KvLedger, estimator: Forecaster | None) -> None:
        self.queue = Queue(rules)
        self._limits = limits
        self._ledger = ledger
        self._estimator = estimator
        self._jobs: dict[int, Job] = {}
        self._awaiting: dict[bytes, dict[int, Job]] = {}
        self._outdated: dict[int, Job] = {}

    def add(self, job: Job, correction: Correction) -> None:
        """Into the queue, with what is known now; forecasts are multiplied with `correction`."""
        if self._ledger.caching:
            self._look_up(job)
        seconds = 0.0
        if job.deadline_s < NO_DEADLINE_S:  # else there is nothing to lose, and nothing to forecast
            new, cached = job.target - job.expected, job.expected
            seconds = prompt_s(self._estimator, self._limits, correction, new, cached)
        self.queue.add(job.waiting_entry(self._limits.block_size, seconds))
        self._jobs[job.id] = job

    def discard(self, job: Job) -> None:
        """Out of the queue, if it is there: it is not where a forecast failed as it was to be queued."""
        self.queue.discard(job.id)
        self._jobs.pop(job.id, None)
        self._outdated.pop(job.id, None)
        alike = self._awaiting.get(job.awaits)
        if alike is not None:
            alike.pop(job.id, None)
            if not alike:
                del self._awaiting[job.awaits]

    def found(self, job: Job, tokens: int) -> None:
        """A job that was here has been admitted, and the cache had `tokens` tokens of it."""
        if tokens < job.expected:
            self._outdated |= {other.id: other for other in self._jobs.values() if other.expected}

    def named(self, name: bytes) -> None:
        """The block of this name can be found, and perhaps more after it."""
        self._outdated |= self._awaiting.pop(name, {})

    def prefixes_forgotten(self, correction: Correction) -> None:
        """Nothing is cached any more."""
        for job in [job for job in self._jobs.values() if job.expected]:
            self._again(job, correction)

    def look_again(self, correction: Correction) -> None:
        """Look up some of those for whom it may have changed."""
        if self._outdated:
            for job in list(islice(self._outdated.values(), AT_ONCE)):
                self._again(job, correction)

    def _again(self, job: Job, correction: Correction) -> None:
        self.discard(job)
        self.add(job, correction)

    def _look_up(self, job: Job) -> None:
        names = job.findable_names(self._limits.block_size)
        known = self._ledger.look_up(names)
        job.expected, job.awaits = known * self._limits.block_size, b""
        if known < len(names):
            job.awaits = names[known]
            self._awaiting.setdefault(job.awaits, {})[job.id] = job
