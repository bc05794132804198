"""Requests whose every token must fit a grammar, between one mask and the next.

Knows nothing about grammars: the guide, beside the loop, makes the masks. A row rides in a decode step only with the
mask of the token that it draws there. So it leaves the rows when such a step starts, and joins them again when the
guide has heard the token and answered; the others stay a step ahead and lose nothing but the room it takes in a step.
"""

from bulletserve.core.events import Masked
from bulletserve.core.ports import Guide
from bulletserve.scheduler.job import Job, Phase


class MaskedRows:
    """`riding`: rows of the next decode step, their masks known. What the guide owes an answer for is in none."""

    def __init__(self, guide: Guide | None) -> None:
        self.riding: dict[int, Job] = {}
        self._guide = guide
        self._owed: dict[int, Job] = {}
        self._owed_rows = 0

    @property
    def owed(self) -> int:
        """Requests for which the guide owes a mask."""
        return len(self._owed)

    @property
    def owed_rows(self) -> int:
        """Those of them that are rows, but for the mask."""
        return self._owed_rows

    def problem(self, job: Job) -> str:
        """Why a request cannot be served; "" if it can."""
        return "this engine follows no grammars" if job.masked and self._guide is None else ""

    def begin(self, job: Job) -> None:
        """A request has arrived."""
        assert self._guide is not None
        self._owed[job.id] = job
        self._guide.begin(job.id, job.request.grammar)

    def drawn(self, job: Job) -> None:
        """A row's mask is used up, its next token known."""
        self._owed[job.id] = job
        self._owed_rows += 1
        assert self._guide is not None
        self._guide.follow(job.id, job.tokens[-1])

    def take(self, made: Masked) -> Job | None:
        """The guide has answered; who it is, if anybody still waits for it."""
        job = self._owed.pop(made.request_id, None)
        if job is not None:
            self._owed_rows -= job.phase is Phase.DECODING
            job.mask = made.mask
        return job

    def forget(self, job: Job) -> None:
        """It has ended."""
        if self._owed.pop(job.id, None) is not None:
            self._owed_rows -= job.phase is Phase.DECODING
        if self._guide is not None:
            self._guide.forget(job.id)
