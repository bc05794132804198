"""The prompts that are being read: admitted requests, the batch between its layers, and first tokens being drawn.

Knows nothing about blocks, lanes or decode. A request is here from its admission to the draw of its first token, or
until it joins a step that comes after that. A prompt that is cut into token ranges comes back to the admitted after
each range but its last.
"""

from collections.abc import Collection, Sequence

from bulletserve.core.launch import PromptPart
from bulletserve.core.snapshot import AdmittedEntry, PrefillProgress
from bulletserve.scheduler.job import Job, Phase

TokenRanges = tuple[tuple[int, int], ...]


class PromptSet:
    """`batch` is the started prefill batch until its last layer is started, `progress` its state for the snapshot.

    `drawing` counts prompts that are finished in started steps, whose first token is not known yet and that have not
    joined the rows ahead of it.
    """

    def __init__(self) -> None:
        self.batch: tuple[Job, ...] = ()
        self.progress: PrefillProgress | None = None
        self.drawing = 0
        self._admitted: dict[int, Job] = {}
        self._shown: dict[int, AdmittedEntry] = {}
        self._entries: tuple[AdmittedEntry, ...] | None = ()

    @property
    def admitted(self) -> Collection[Job]:
        """Jobs with blocks reserved, in no started batch."""
        return self._admitted.values()

    @property
    def entries(self) -> tuple[AdmittedEntry, ...]:
        """The admitted as a snapshot shows them; the same tuple until they change."""
        if self._entries is None:
            self._entries = tuple(self._shown.values())
        return self._entries

    def admit(self, job: Job) -> None:
        """Add a job that has its seat and blocks, or the rest of a prompt whose earlier range is started."""
        job.phase = Phase.ADMITTED
        self._admitted[job.id] = job
        self._shown[job.id] = job.admitted_entry()  # nothing of it changes while it is here
        self._entries = None

    def leave(self, job: Job) -> None:
        """Take a job out, wherever it is; a member of the batch stays in it, for its place in the started steps."""
        if job.phase is Phase.ADMITTED:
            del self._admitted[job.id], self._shown[job.id]
            self._entries = None
        elif job not in self.batch:
            self.drawing -= 1

    def open(self, jobs: tuple[Job, ...]) -> None:
        """Admitted jobs become the batch."""
        for job in jobs:
            del self._admitted[job.id], self._shown[job.id]
            job.phase = Phase.PREFILLING
        self._entries = None
        self.batch = jobs

    def advance(self, requests: tuple[int, ...], ranges: TokenRanges, next_layer: int) -> None:
        """Layers below `next_layer` are started."""
        if self.progress is None:
            entries = [job.admitted_entry() for job in self.batch]
            self.progress = PrefillProgress(
                requests,
                ranges,
                next_layer,
                sum(job.target == end for job, (_, end) in zip(self.batch, ranges, strict=True)),
                min(entry.deadline_s for entry in entries),
                min(entry.tpot_s for entry in entries),
            )
        else:
            self.progress = self.progress._replace(next_layer=next_layer)

    def close(self, ranges: TokenRanges) -> tuple[list[Job], Sequence[Job]]:
        """The batch's last layer is started: jobs whose prompt is finished (they draw a token), and those that ended.

        Finished ones that live on count as `drawing` until `drawn`; unfinished ones are admitted again.
        """
        batch, self.batch, self.progress = self.batch, (), None
        finished: list[Job] = []
        for job, (_, end) in zip(batch, ranges, strict=True):
            job.computed = end
            if end == job.target:
                job.kv_tokens = end
                finished.append(job)
                self.drawing += not job.ended
            elif not job.ended:
                self.admit(job)
        return finished, [job for job in batch if job.ended]

    def drawn(self, job: Job) -> None:
        """A finished prompt goes on to decode."""
        self.drawing -= 1
        job.phase = Phase.DECODING

    def drop(self) -> tuple[Job, ...]:
        """Nobody waits for the batch any more; its members."""
        batch, self.batch, self.progress = self.batch, (), None
        return batch


def prompt_parts(batch: Sequence[Job], ranges: TokenRanges) -> tuple[PromptPart, ...]:
    """What each prompt of a batch has in a step that reads `ranges` of them."""
    pairs = zip(batch, ranges, strict=True)
    return tuple([PromptPart(job.seat, first, end, end == job.target) for job, (first, end) in pairs])
