"""Every request that somebody waits for: sent to the engine, fed with its outputs, ended whatever happens.

Knows nothing about HTTP. All of it lives on the event loop's thread. The rules: who asked is answered, also when the
engine dies; what nobody waits for is aborted; and more requests than may wait are refused at once.
"""

import itertools
import time
from collections.abc import Iterator, Sequence

from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.errors import BulletError, EngineDied, EngineError, InvalidRequest, Overloaded, RequestError
from bulletserve.core.events import Output, Status
from bulletserve.core.request import Finished, FinishReason
from bulletserve.core.token_rules import TokenLogprobs
from bulletserve.server.calls import Answer, Call, End, Prompt
from bulletserve.telemetry.end_rate import EndRate
from bulletserve.telemetry.metrics import AnswerTimes, Metrics
from bulletserve.transport.front_end import FrontEnd
from bulletserve.transport.messages import Fatal, ToFront

_RETRY_AFTER_S = 1.0
"""When to come back at the earliest, and where nobody knows better."""


class ShuttingDown(RequestError):
    """The server takes no new requests."""

    status = 503
    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class OpenRequests:
    """The open requests of one front, over one engine at a time.

    max_waiting: how many requests may be without a first token. status_limit_s, step_limit_s: see `trouble`.
    `info` is what the engine said when it was ready.
    """

    def __init__(
        self,
        engine: FrontEnd,
        info: EngineInfo,
        metrics: Metrics,
        *,
        max_waiting: int = 1024,
        status_limit_s: float = 10.0,
        step_limit_s: float = 60.0,
    ) -> None:
        self.info = metrics.info = info
        self.metrics = metrics
        self._engine: FrontEnd | None = engine
        self._max_waiting = max_waiting
        self._status_limit_s = status_limit_s
        self._step_limit_s = step_limit_s
        self._open: dict[int, tuple[Call, Answer]] = {}
        self._waiting = 0
        self._ends = EndRate()
        self._ids = itertools.count(1)
        self._heard_s = time.monotonic()
        self._last_words = ""
        self._closing = False

    def __len__(self) -> int:
        return len(self._open)

    def new_id(self) -> int:
        """An id that no request has had."""
        return next(self._ids)

    def start(self) -> None:
        """Listen to the engine, on the running event loop."""
        if self._engine is not None:
            self._heard_s = time.monotonic()
            self._engine.listen(self._receive)

    def replace_engine(self, engine: FrontEnd, info: EngineInfo) -> None:
        """Go on with a new engine process, which is ready; requests of the old one have failed."""
        self.engine_died("replaced by a new engine")
        self._engine, self.info, self._last_words = engine, info, ""
        self.metrics.info = info
        self.start()

    def engine_died(self, message: str) -> None:
        """The engine is gone: end every open request with an error, and refuse new ones. May be called again."""
        if self._engine is None:
            return
        self._engine.close()
        self._engine = None
        self._last_words = message
        self.metrics.update(None)
        self._fail_all(EngineDied(f"the engine died: {message}"))

    def refuse_new(self) -> None:
        """Take no new requests from now on."""
        self._closing = True

    def end_all(self) -> None:
        """End every open request with `ShuttingDown`."""
        self._abort(list(self._open))
        self._fail_all(ShuttingDown())

    def trouble(self) -> str | None:
        """Why the engine cannot be expected to make progress; None if it can."""
        if self._closing:
            return "the server is shutting down"
        if self._engine is None:
            return f"the engine is gone: {self._last_words}"
        status = self.metrics.status
        silent_s = time.monotonic() - self._heard_s
        if silent_s > self._status_limit_s:
            return f"the engine has said nothing for {silent_s:.0f} s"
        if status is not None and status.oldest_step_s > self._step_limit_s:
            return f"a step of the engine has been running for {status.oldest_step_s:.0f} s"
        if status is not None and status.standing_s > self._status_limit_s:
            return f"the engine has started nothing for {status.standing_s:.0f} s, though requests wait"
        return None

    def submit(self, prompts: Sequence[Prompt], *, streaming: bool) -> Call:
        """Send all prompts of one call, or none. Whoever gets the call must `close` it.

        Raises `Overloaded`, `InvalidRequest` (more prompts than may ever wait), `ShuttingDown` or `EngineDied`.
        """
        self.check_room(len(prompts))
        if self._engine is None:
            raise EngineDied(f"the engine is gone: {self._last_words}")
        self._engine.submit([prompt.request for prompt in prompts])
        call = Call(prompts, streaming=streaming)
        for answer in call.answers:
            self._open[answer.prompt.request.id] = call, answer
        self._more_wait(len(prompts))
        return call

    def check_room(self, prompts: int, copies: int = 1, *, at_work: int = 0) -> None:
        """Raise what `submit` would for so many prompts with `copies` answers each, but for a dead engine: before any
        work is spent on them. `at_work`: calls that are not submitted yet."""
        if self._closing:
            raise ShuttingDown()
        if prompts > self._max_waiting:
            raise InvalidRequest(f"at most {self._max_waiting} prompts fit in one request", param="prompt")
        if prompts * copies > self._max_waiting:
            asked = f"{prompts} prompts with n={copies}" if prompts > 1 else f"n={copies}"
            raise InvalidRequest(f"{asked}: at most {self._max_waiting} answers fit in one request", param="n")
        if self._waiting + prompts * copies + at_work > self._max_waiting:
            raise Overloaded(
                f"{self._waiting} requests are waiting, at most {self._max_waiting} may", retry_after_s=self._queue_s()
            )

    def reset_cache(self) -> None:
        """Have every cached prefix forgotten. Raises `EngineDied`."""
        if self._engine is None:
            raise EngineDied(f"the engine is gone: {self._last_words}")
        self._engine.reset_cache()

    def _queue_s(self) -> float:
        """When the queue as it stands will have been served, as fast as requests end; at first by the engine's
        forecast, which knows of prompts only."""
        status = self.metrics.status
        forecast_s = _RETRY_AFTER_S if status is None else status.queue_s
        wait_s = self._ends.wait_s(self._waiting, len(self._open) - self._waiting, time.monotonic(), forecast_s)
        return max(_RETRY_AFTER_S, wait_s)

    def _more_wait(self, count: int) -> None:
        """Of all requests so many more (fewer, below 0) have no token yet."""
        self._waiting += count
        self._ends.waiting(self._waiting, time.monotonic())

    def close(self, call: Call) -> None:
        """Nobody reads this call any more: abort what is unfinished."""
        if call.unfinished:
            ids = [a.prompt.request.id for a in call.answers if a.prompt.request.id in self._open]
            self._abort(ids)
            for request_id in ids:
                self._forget(request_id, "abort")

    def _receive(self, message: ToFront) -> None:
        if isinstance(message, Output):
            self._deliver(message)
        elif isinstance(message, Status):
            self._heard_s = time.monotonic()
            self.metrics.update(message)
        elif isinstance(message, Fatal):
            self.engine_died(message.message)

    def _deliver(self, output: Output) -> None:
        now_s, opened, gaps = time.monotonic(), self._open, self.metrics.token_gap_s
        stopped_by = {f.request_id: f.stop_id for f in output.finished if f.stop_id is not None}
        matched: list[int] = []
        for place, (request_id, cached_tokens) in enumerate(output.first_tokens):
            if request_id in opened:
                _, answer = opened[request_id]
                answer.cached_tokens = cached_tokens
                answer.admitted_s = output.admitted_s[place] if output.admitted_s else now_s
        told = self._told(output) if output.logprobs or output.prompt_logprobs else {}
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            entry = opened.get(request_id)
            if entry is None:  # the client left or a stop string matched, and the engine does not know yet
                continue
            call, answer = entry
            extras = answer.prompt.extras
            if extras is not None and extras.silent:
                answer.last_token_s = now_s
                continue
            answer.tokens += 1
            if answer.tokens == 1:
                self._first_token(answer, now_s)
            else:
                gaps.observe(now_s - answer.last_token_s)
            answer.last_token_s = now_s
            if extras is not None:
                extras.hear(token, next(told[request_id], None) if request_id in told else None)
            if stopped_by and stopped_by.get(request_id) == token and not (extras is not None and extras.shows_stop):
                continue  # it ends the answer and is no part of its text
            text = answer.prompt.detokenizer.push(token)
            if answer.prompt.detokenizer.matched is not None:
                matched.append(request_id)
                self._finish(call, answer, text, End("stop", answer.prompt.detokenizer.matched))
            elif text:
                call.add(answer, text)
        self.metrics.generation_tokens += len(output.tokens)
        if output.tokens:
            self.metrics.turn_tokens.observe(len(output.tokens))
        for finished in output.finished:
            if finished.request_id in opened:
                self._finished(*opened[finished.request_id], finished)
        self._abort(matched)

    def _told(self, output: Output) -> dict[int, Iterator[TokenLogprobs]]:
        """What is told of the tokens of each request, in order; hands on at once what is told of prompts."""
        for request_id, first, several in output.prompt_logprobs:
            _, answer = self._open.get(request_id, (None, None))
            if answer is not None and answer.prompt.extras is not None:
                answer.prompt.extras.hear_of_prompt(first, several)
        told: dict[int, list[TokenLogprobs]] = {}
        for request_id, one in output.logprobs:
            told.setdefault(request_id, []).append(one)
        return {request_id: iter(several) for request_id, several in told.items()}

    def _first_token(self, answer: Answer, now_s: float) -> None:
        answer.first_token_s = now_s
        self._more_wait(-1)
        self.metrics.prompt_tokens += answer.prompt_tokens
        self.metrics.first_token_s.observe(now_s - answer.prompt.request.arrival_s)

    def _finished(self, call: Call, answer: Answer, finished: Finished) -> None:
        if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
            stop_id = finished.stop_id if finished.stop_id in answer.prompt.named_stop_ids else None
            text = answer.prompt.detokenizer.finish()
            matched = answer.prompt.detokenizer.matched
            end = End(finished.reason.value, stop_id) if matched is None else End("stop", matched)
            if answer.prompt.extras is not None and answer.prompt.extras.silent:
                end = End("length")
            self._finish(call, answer, text, end)
            return
        self._forget(finished.request_id, "abort" if finished.reason is FinishReason.ABORT else "error")
        call.fail(_failure(finished))

    def _finish(self, call: Call, answer: Answer, text: str, end: End) -> None:
        request = answer.prompt.request
        self._forget(request.id, end.finish_reason)
        call.finish(answer, text, end)
        self.metrics.answered(
            request.slo,
            AnswerTimes(request.arrival_s, answer.admitted_s, answer.first_token_s, answer.last_token_s),
            prompt_tokens=len(request.prompt_ids),
            tokens=answer.tokens,
            max_tokens=request.max_tokens,
        )
        if not answer.prompt.copy:
            self.metrics.request_n.observe(answer.prompt.copies)

    def _forget(self, request_id: int, reason: str) -> None:
        _, answer = self._open.pop(request_id)
        if not answer.tokens:
            self._more_wait(-1)
        elif reason != "error":
            self._ends.ended(len(self._open) - self._waiting, time.monotonic())
        self.metrics.finished[reason] += 1

    def _fail_all(self, error: BulletError) -> None:
        for request_id, (call, _) in list(self._open.items()):
            self._forget(request_id, "error")
            call.fail(error)

    def _abort(self, request_ids: Sequence[int]) -> None:
        if request_ids and self._engine is not None:
            try:
                self._engine.abort(request_ids)
            except EngineDied:
                return  # its end is told by whoever watches the process


def _failure(finished: Finished) -> BulletError:
    """What the client is told when the engine ends a request without an answer.

    A refusal that says when to come back is an overload; one that does not is about the request itself.
    """
    if finished.reason is FinishReason.REFUSED:
        if finished.retry_after_s is not None:
            return Overloaded(finished.message, retry_after_s=finished.retry_after_s)
        return InvalidRequest(finished.message)
    return EngineError(finished.message or "the engine stopped this request")
