"""The engine's state as the scheduler knows it: events change it, plans project it, `engine_view` shows it.

Knows nothing about policies, devices or sockets. Every step is planned from the projected state, one step ahead:
starting a decode step assumes that all its rows continue. When a step's tokens arrive and a row turns out to have
ended, the token that the next step draws for it is void: it is not told, not counted and not cached, and the row's
blocks are freed only when that step has run too.
"""

from collections.abc import Callable, Iterable

from bulletserve.core.correction import Correction
from bulletserve.core.events import Aborted, Arrived, CacheReset, Event, Masked, Output, StepDone, Stop
from bulletserve.core.launch import Launch, PromptPart, Seat
from bulletserve.core.plan import DecodeStep, Lane, MixedStep, Plan, PrefillGroup, Start, comes_after_both, lanes_of
from bulletserve.core.ports import Guide
from bulletserve.core.request import Finished, FinishReason, Request
from bulletserve.core.snapshot import Limits
from bulletserve.core.token_rules import NO_TOKEN, NO_TOKEN_LEFT
from bulletserve.scheduler.answer_lengths import AnswerLengths
from bulletserve.scheduler.decode_set import DecodeSet
from bulletserve.scheduler.job import Job, Phase
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.lane_queue import LaneQueues
from bulletserve.scheduler.masked_rows import MaskedRows
from bulletserve.scheduler.outbox import Outbox
from bulletserve.scheduler.policy import Forecaster
from bulletserve.scheduler.prefix_sharing import PrefixSharing
from bulletserve.scheduler.prompt_set import PromptSet, TokenRanges, prompt_parts
from bulletserve.scheduler.queue_rules import FIRST_COME, QueueRules
from bulletserve.scheduler.started_step import StartedStep
from bulletserve.scheduler.step_watch import StepWatch
from bulletserve.scheduler.waiting import Waiting
from bulletserve.telemetry.lanes import LaneTimes

NAMING_STEPS = 64
"""A row names the blocks it has filled every so many steps, each seat in its turn, and when it ends."""


class State:
    """Requests, seats and blocks of one engine. Owned by the loop's thread.

    `rules`: the policy's, for the queue. With an `estimator` each step that ends is compared with its forecast by
    `watch`, which makes `correction`. `guide` makes the masks of requests with a grammar; without one they are refused.
    """

    def __init__(
        self,
        limits: Limits,
        ledger: KvLedger,
        rules: QueueRules = FIRST_COME,
        estimator: Forecaster | None = None,
        guide: Guide | None = None,
    ) -> None:
        self.limits = limits
        self.ledger = ledger
        self.estimator = estimator
        self.correction = Correction()
        self.watch = None if estimator is None else StepWatch(estimator)
        self.lanes = LaneTimes()
        self.preemptions = 0
        self.stopped = False
        self.fault = ""
        self.waiting = Waiting(rules, limits, ledger, estimator)
        self.queue = self.waiting.queue
        self.prefixes = PrefixSharing(ledger, self.waiting)
        self.jobs: dict[int, Job] = {}
        self.prompts = PromptSet()
        self.decoding = DecodeSet(limits.block_size)
        self._masked = MaskedRows(guide)
        self.seats = list(range(limits.max_seqs - 1, -1, -1))
        self.steps: dict[int, StartedStep] = {}
        self._next_step = 0
        self._last_rows_step = -1
        self.lane_queues = LaneQueues(limits)
        self._outbox = Outbox()
        self.lengths = AnswerLengths()

    @property
    def is_idle(self) -> bool:
        """No open request and no step under way."""
        return not self.jobs and not self.steps

    @property
    def lying(self) -> int:
        """Open requests while no step is under way, but for those that wait for the guide; 0 while one is."""
        return 0 if self.steps else len(self.jobs) - self._masked.owed

    @property
    def lanes_are_full(self) -> bool:
        """No lane takes another step before one of its own has ended."""
        return self.lane_queues.are_full

    @property
    def waits_for_masks(self) -> bool:
        """A mask that is being made may still be in time for the next decode step, and no lane idles for it."""
        if not (self._masked.owed_rows and self.lane_queues.states[Lane.DECODE].steps):
            return False
        prefill_may_idle = not (self.queue or self.prompts.entries or self.prompts.progress)
        return prefill_may_idle or bool(self.lane_queues.states[Lane.PREFILL].steps)

    def apply(self, event: Event, now_s: float) -> None:
        """Take in one event."""
        match event:
            case StepDone():
                self._step_done(event, now_s)
            case Masked():
                self._mask_made(event, now_s)
            case Arrived(request):
                self._arrive(Job(request))
            case Aborted(request_id):
                if request_id in self.jobs:
                    self._end(self.jobs[request_id], FinishReason.ABORT)
            case CacheReset():
                self.ledger.forget_prefixes()
                self.waiting.prefixes_forgotten(self.correction)
            case Stop():
                self.stopped = True

    def end_all(self, reason: FinishReason, message: str, unheard: Iterable[Request] = ()) -> None:
        """Answer every open request and those not taken in yet, however broken the rest of the state is."""
        for job in self.jobs.values():
            if job.masked:
                self._masked.forget(job)
        for request_id in (*self.jobs, *(request.id for request in unheard)):
            self._outbox.finished.append(Finished(request_id, reason, None, message))
        self.jobs.clear()

    def fail_all(self, message: str) -> None:
        """End every open request with an error, and go on."""
        for job in tuple(self.jobs.values()):
            self._end(job, FinishReason.ERROR, message=message)

    def _arrive(self, job: Job) -> None:
        """Into the queue; what could never end, even alone, is refused: it would block all behind it."""
        self.jobs[job.id] = job
        if problem := job.never_ends(self.limits) or self._masked.problem(job):
            self._end(job, FinishReason.REFUSED, message=problem)
        elif job.masked:
            self._masked.begin(job)
        else:
            self.waiting.add(job, self.correction)

    def _mask_made(self, made: Masked, now_s: float) -> None:
        job = self._masked.take(made)
        if job is None:
            return
        if made.error:
            reason = FinishReason.ERROR if made.ours else FinishReason.REFUSED
            self._end(job, reason, message=made.error, retry_after_s=made.retry_after_s)
        elif made.over:
            self._end(job, FinishReason.STOP)
        elif job.phase is Phase.WAITING:
            self.waiting.add(job, self.correction)
        else:
            self._join(job, now_s)
            self._masked.riding[job.id] = job

    def _step_done(self, done: StepDone, now_s: float) -> None:
        step = self.steps.pop(done.step_id)
        lanes, began_s, ended_s = lanes_of(step.launch.step), done.started_s, done.finished_s
        lane = lanes[0]
        ran = self.lane_queues.states[lane].steps[0]
        self.lane_queues.end(done.step_id, lanes, ended_s)
        if self.watch is not None and not done.error:
            beside = self.lane_queues.states[Lane.PREFILL if lane is Lane.DECODE else Lane.DECODE].steps
            self.watch.ended(lane, ran.shape, ran.sms, began_s, ended_s, beside[0] if beside else None)
            self.correction = self.watch.correction
        self.lanes.observe(lane, began_s, ended_s, bool(step.launch.rows), ran.sms)
        if done.error:
            self._step_failed(step, done)
        else:
            for job, tokens in step.settles:
                self.prefixes.settle(job, tokens)
            self._take_tokens(step, done, now_s)
        for job in step.leaving:
            self._vacate(job)
        self.waiting.look_again(self.correction)
        if not (self.decoding or self._masked.owed_rows or any(step.launch.rows for step in self.steps.values())):
            self.lanes.pause()

    def _step_failed(self, step: StartedStep, done: StepDone) -> None:
        """End every request of the step, also those whose next layers have been started already."""
        if done.fatal:
            self.fault = done.error
        for job in (*step.batch, *step.drawn):
            self._end(job, FinishReason.ERROR, message=done.error)

    def _take_tokens(self, step: StartedStep, done: StepDone, now_s: float) -> None:
        """One pass over the rows of a step, then those for whom it was more than one more token."""
        stopped: list[tuple[Job, int]] = []
        for job, token in zip(step.drawn, done.tokens, strict=True):
            job.tokens.append(token)
            if token in job.stop_ids:
                stopped.append((job, token))
        for job in [job for job, token in stopped if token == NO_TOKEN]:
            job.tokens.pop()
            step.void.add(job.id)
            self._end(job, FinishReason.REFUSED, message=NO_TOKEN_LEFT)
        self._outbox.tell(step, done)
        for job in step.firsts:
            self._speak(job, now_s)
        for job, token in stopped:
            self.prefixes.settle(job, len(job.tokens) - 1)
            self._end(job, FinishReason.STOP, stop_id=token)
        for job in step.lasts:
            self.prefixes.settle(job, len(job.tokens) - 1)
            self._end(job, FinishReason.LENGTH)
        for job in step.firsts:
            if job.phase is Phase.PREFILLING:
                self.prompts.drawn(job)
                if not job.masked:
                    self._join(job, now_s)
        for job in step.masked:
            if not job.ended:
                self._masked.drawn(job)
        for job in self.decoding.next_in_turn(NAMING_STEPS) if step.launch.rows else ():
            if job.speaking:
                self.prefixes.settle(job, len(job.tokens) - 1)

    def _speak(self, job: Job, now_s: float) -> None:
        """A prompt is computed, and the token after it is known."""
        job.speaking = True
        if job.first_token_s is None and not job.ended:
            job.first_token_s = now_s
            if job in self.decoding:
                self.decoding.spoke(job, now_s)
            self._outbox.firsts.append((job.id, min(job.cached, job.prompt_tokens)))

    def _end(
        self,
        job: Job,
        reason: FinishReason,
        stop_id: int | None = None,
        message: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        if not job.ended:
            job.ended = True
            self._outbox.finished.append(Finished(job.id, reason, stop_id, message, retry_after_s))
            del self.jobs[job.id]
            if job.masked:
                self._masked.forget(job)
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.lengths.add(len(job.tokens) - job.prompt_tokens)
            self._withdraw(job)
            if job.last_step in self.steps:
                for step in self.steps.values():
                    step.void.add(job.id)

    def _withdraw(self, job: Job) -> None:
        """Take a job out of all that is planned from; it vacates once no started step can touch its blocks."""
        match job.phase:
            case Phase.WAITING:
                self.waiting.discard(job)
                return
            case Phase.LEAVING:
                return
            case Phase.ADMITTED | Phase.PREFILLING:
                self.prompts.leave(job)
            case Phase.DECODING if job in self.decoding:
                self._leave_rows(job)
        job.phase = Phase.LEAVING
        if job not in self.prompts.batch:
            self._let_go(job)
        elif all(member.ended for member in self.prompts.batch):
            for member in self.prompts.drop():
                self._let_go(member)

    def _leave_rows(self, job: Job) -> None:
        self.decoding.leave(job)
        self._masked.riding.pop(job.id, None)
        job.last_step = max(job.last_step, self._last_rows_step)

    def _let_go(self, job: Job) -> None:
        step = self.steps.get(job.last_step)
        if step is None:
            self._vacate(job)
        else:
            step.leaving.append(job)

    def _vacate(self, job: Job) -> None:
        if job.speaking:
            self.prefixes.settle(job, len(job.tokens) - 1)
        self.ledger.release(job.id)
        self.seats.append(job.seat)
        job.leave_seat()
        if not job.ended:
            self.waiting.add(job, self.correction)

    def carry_out(self, plan: Plan, now_s: float, start: Callable[[Launch], None]) -> None:
        """Do what a checked plan says; `start` receives each launch."""
        for refusal in plan.refuse:
            job, retry_s = self.jobs[refusal.request_id], refusal.retry_after_s
            self._end(job, FinishReason.REFUSED, message=refusal.reason, retry_after_s=retry_s)
        for request_id in plan.preempt:
            self.preemptions += 1
            self._withdraw(self.jobs[request_id])
        for request_id in plan.admit:
            self._admit(self.jobs[request_id])
        for step in plan.starts:
            start(self._launch(step, now_s))

    def _admit(self, job: Job) -> None:
        cached_tokens = self.prefixes.allocate(job)
        self.waiting.discard(job)
        self.waiting.found(job, cached_tokens)
        job.take_seat(self.seats.pop(), cached_tokens)
        self.prompts.admit(job)

    def _launch(self, start: Start, now_s: float) -> Launch:
        """Project the step: rows first, because requests whose prompt ends here join the step after it."""
        step = StartedStep(now_s)
        seats: tuple[Seat, ...] = ()
        parts: tuple[PromptPart, ...] = ()
        blocks: list[tuple[int, int]] = []
        rows: tuple[int, ...] = ()
        context_tokens = 0
        if not isinstance(start, PrefillGroup) and comes_after_both(start, self.limits.lattice):
            self._join_ahead(now_s)
        if not isinstance(start, PrefillGroup) and self.decoding:
            rows = self.decoding.rows
            context_tokens = self.decoding.tokens + len(rows)
            blocks = self._project_rows(step)
        if not isinstance(start, DecodeStep):
            layers = (0, self.limits.num_layers) if isinstance(start, MixedStep) else start.layer_range
            if layers[0] == 0:
                seats = self._open_batch(start.requests)
            step.batch = self.prompts.batch
            for job in step.batch:
                job.last_step = self._next_step
            parts = prompt_parts(step.batch, start.token_ranges)
            if layers[1] == self.limits.num_layers:
                self._close_batch(step, start.token_ranges, now_s, join=isinstance(start, MixedStep))
            else:
                self.prompts.advance(start.requests, start.token_ranges, layers[1])
        masks = tuple([(job.seat, job.mask) for job in step.masked])
        step.launch = Launch(self._next_step, start, seats, tuple(blocks), parts, rows, masks)
        self.steps[self._next_step] = step
        self.lane_queues.start(self._next_step, start, len(step.firsts), len(rows), context_tokens, now_s)
        self._next_step += 1
        return step.launch

    def _join_ahead(self, now_s: float) -> None:
        """Prompts that end in groups before a step are rows of it, as far as blocks go: the plan does not know."""
        for job in [job for step in self.steps.values() for job in step.firsts if job.phase is Phase.PREFILLING]:
            needs_block = job.kv_tokens % self.limits.block_size == 0
            has_room = not needs_block or self.decoding.blocks_needed < self.ledger.free_blocks
            if has_room and not (job.ended or job.masked or job.is_full):
                self.prompts.drawn(job)
                self._join(job, now_s)

    def _project_rows(self, step: StartedStep) -> list[tuple[int, int]]:
        step.drawn, step.drawn_ids = self.decoding.jobs, self.decoding.ids
        due = self.decoding.due
        blocks = self.ledger.extend([job.id for job in due])
        appended = [(job.seat, block) for job, block in zip(due, blocks, strict=True)]
        self._last_rows_step = self._next_step
        step.masked = list(self._masked.riding.values())
        step.lasts.extend(self.decoding.step())
        for job in step.lasts:
            self._leave_rows(job)
        for job in tuple(self._masked.riding.values()):
            self._leave_rows(job)
        return appended

    def _open_batch(self, requests: tuple[int, ...]) -> tuple[Seat, ...]:
        self.prompts.open(tuple(self.jobs[request_id] for request_id in requests))
        seats: list[Seat] = []
        for job in self.prompts.batch:
            if not job.seated:
                job.seated = True
                seats.append(job.seat_card(self.ledger.held(job.id)))
        return tuple(seats)

    def _close_batch(self, step: StartedStep, ranges: TokenRanges, now_s: float, *, join: bool) -> None:
        """The batch's last layer is started; `join`: finished prompts decode from the next step on."""
        step.settles = tuple((job, end) for job, (_, end) in zip(step.batch, ranges, strict=True))
        finished, ended = self.prompts.close(ranges)
        step.firsts = tuple(finished)
        step.drawn = step.firsts + step.drawn
        step.drawn_ids = tuple([job.id for job in finished]) + step.drawn_ids
        step.leaving.extend(ended)
        step.void.update([job.id for job in ended])
        for job in finished:
            if job.masked:
                step.masked.append(job)
            if job.is_full:
                step.lasts.append(job)
            elif join and not (job.ended or job.masked):
                self.prompts.drawn(job)
                self._join(job, now_s)

    def _join(self, job: Job, now_s: float) -> None:
        if not self.decoding:
            self.lane_queues.rested(Lane.DECODE, now_s)
        self.decoding.join(job, now_s)

    def take_output(self, now_s: float) -> Output | None:
        """What happened since the last call, for the requests' owners; None if nothing did."""
        return self._outbox.take(now_s)
