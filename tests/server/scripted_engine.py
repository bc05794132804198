"""An engine that answers what a test tells it to, in a thread, over the real transport."""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.events import Aborted, Arrived, CacheReset, Event, Output, Status, Stop
from bulletserve.core.request import Finished, FinishReason, Request
from bulletserve.core.token_rules import TokenLogprobs
from bulletserve.transport.addresses import Addresses
from bulletserve.transport.engine_end import EngineEnd

Script = Callable[[Request], Sequence[int]]


class _Inbox:
    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def post(self, event: Event) -> None:
        self.events.put(event)


class ScriptedEngine:
    """Every running request gets the next token of its script each step, `per_step` tokens at once.

    A script that ends is followed by `eos`; the token at place p of an answer is told with the logprob -p. Tests change
    the public attributes at any time: `pause_s` is the length of a step, `seats` how many requests have a part in it,
    `held` stops all progress, `refusal` answers every arrival, `silent` sends no status.
    """

    def __init__(self, addresses: Addresses, *, eos: int, vocab_size: int, max_model_len: int = 256) -> None:
        self.eos = eos
        self.reset()
        self.running: dict[int, tuple[Request, Sequence[int], int]] = {}
        self.info = EngineInfo(
            "scripted", vocab_size, max_model_len, 16, 1000, 64, "time_sliced", "cpu", "float32", True
        )
        self._inbox = _Inbox()
        self._end = EngineEnd(addresses, self._inbox, block_size=16)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._over = False
        self._thread.start()

    def reset(self) -> None:
        """Every attribute as at the start."""
        self.script: Script = lambda request: request.prompt_ids
        self.pause_s = 0.0
        self.per_step = 1
        self.seats = 1000
        self.held = False
        self.silent = False
        self.oldest_step_s = 0.0
        self.queue_s = 0.0
        self.standing_s = 0.0
        self.refusal: Finished | None = None
        self.arrived: list[Request] = []
        self.aborted: list[int] = []
        self.cache_resets = 0

    def close(self) -> None:
        """Vanish without a word, as a killed process does."""
        self._over = True
        self._inbox.post(Stop())
        self._thread.join()
        self._end.close()

    def die(self, message: str) -> None:
        """End with last words."""
        self._over = True
        self._inbox.post(Stop())
        self._thread.join()
        self._end.fatal(message)
        self._end.close()

    def _run(self) -> None:
        self._end.ready(self.info)
        status_due = 0.0
        while not self._over:
            self._hear(wait_s=0.0 if self.running and not self.held else 0.02)
            if self.running and not self.held:
                self._step()
                time.sleep(self.pause_s)
            if time.monotonic() > status_due and not self.silent:
                self._end.report(self._status())
                status_due = time.monotonic() + 0.1

    def _status(self) -> Status:
        running = len(self.running)
        return Status(
            *(time.monotonic(), running, 0, running, 1000, self.oldest_step_s, 3, 1, 7, 40, 30, 0, 0.0, 0.25),
            queue_s=self.queue_s,
            standing_s=self.standing_s,
        )

    def _hear(self, wait_s: float) -> None:
        try:
            event = self._inbox.events.get(timeout=wait_s) if wait_s else self._inbox.events.get_nowait()
            while True:
                self._take(event)
                event = self._inbox.events.get_nowait()
        except queue.Empty:
            return

    def _take(self, event: Event) -> None:
        if isinstance(event, Arrived):
            request = event.request
            self.arrived.append(request)
            if self.refusal is not None:
                refusal = self.refusal
                ended = Finished(request.id, refusal.reason, None, refusal.message, refusal.retry_after_s)
                self._end.emit(Output(time.monotonic(), (), (), (), (ended,)))
            else:
                self.running[request.id] = (request, self.script(request), 0)
        elif isinstance(event, Aborted):
            self.aborted.append(event.request_id)
            self.running.pop(event.request_id, None)
        elif isinstance(event, CacheReset):
            self.cache_resets += 1

    def _step(self) -> None:
        ids: list[int] = []
        tokens: list[int] = []
        first: list[tuple[int, int]] = []
        finished: list[Finished] = []
        told: list[tuple[int, TokenLogprobs]] = []
        for request, script, done in list(self.running.values())[: self.seats]:
            for place in range(done, done + self.per_step):
                token = script[place] if place < len(script) else self.eos
                ids.append(request.id)
                tokens.append(token)
                if request.rules is not None and request.rules.logprobs is not None:
                    told.append((request.id, TokenLogprobs(-float(place), 1, (token,), (-float(place),))))
                if place == 0:
                    first.append((request.id, min(4, len(request.prompt_ids))))
                ended = None
                if token in request.stop_ids:
                    ended = Finished(request.id, FinishReason.STOP, token)
                elif place + 1 >= request.max_tokens:
                    ended = Finished(request.id, FinishReason.LENGTH)
                if ended is not None:
                    finished.append(ended)
                    del self.running[request.id]
                    break
                self.running[request.id] = (request, script, place + 1)
        now_s = time.monotonic()
        self._end.emit(Output(now_s, tuple(ids), tuple(tokens), tuple(first), tuple(finished), logprobs=tuple(told)))
