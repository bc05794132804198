"""A run: every request sent when it is due, every answer noted, and how well this client itself kept up.

Knows nothing about files or tables. Single requests may fail in any way; only `stop` ends a run early, and then what
was sent counts as interrupted and what was not sent is left out.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bulletserve.client.dialect import Dialect
from bulletserve.client.outcome import INTERRUPTED, Outcome
from bulletserve.client.prompts import TimedPrompt
from bulletserve.client.server import Server
from bulletserve.core.errors import ServerRefuses
from bulletserve.core.garbage import kept_garbage
from bulletserve.telemetry.client_lag import ClientLag, client_lag
from bulletserve.telemetry.latency import Answer

_TICK_S = 0.005
_TELL_S = 0.5
_LEAD_S = 0.1


@dataclass(slots=True)
class Progress:
    """Where a run is."""

    total: int
    sent: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Run:
    """One run at one rate. `outcomes` in the order in which requests were due; `left_out`: requests that an
    interruption kept from being sent; `start_s`: when time 0 of the list was."""

    rate: float
    start_s: float
    outcomes: Sequence[Outcome]
    lag: ClientLag
    left_out: int = 0

    @property
    def interrupted(self) -> bool:
        """Whether it was stopped before its end."""
        return bool(self.left_out) or any(one.kind == INTERRUPTED for one in self.outcomes)


async def find_dialect(server: Server, dialect: Dialect, prompt: TimedPrompt) -> Dialect:
    """Put one short request to the server; the dialect that it takes. Raises `ServerRefuses` with its reason."""
    while True:
        outcome = _outcome(TimedPrompt(0, 0.0, prompt.prompt, prompt.prompt_tokens, 2), 0.0)
        await server.ask(dialect.path, dialect.body(prompt.prompt, 2), outcome)
        if outcome.ok:
            return dialect
        changed = dialect.without_refused(outcome.message) if outcome.kind in ("http_400", "http_422") else None
        if changed is None:
            raise ServerRefuses(
                f"{server.url}{dialect.path} does not answer the request that was to try it out "
                f"({outcome.kind}): {outcome.message}"
            )
        dialect = changed


async def replay(
    server: Server,
    dialect: Dialect,
    prompts: Sequence[TimedPrompt],
    rate: float,
    stop: asyncio.Event,
    on_end: Callable[[Outcome, float], None] = lambda outcome, start_s: None,
    on_tick: Callable[[Progress], None] = lambda progress: None,
) -> Run:
    """Send every prompt when it is due. `rate` is told on; the prompts' times are taken as they are.

    `on_end` is called with each outcome and the start of the run, `on_tick` about every half a second.
    """
    ordered = sorted(prompts, key=lambda one: one.due_s)
    bodies = [dialect.body(one.prompt, one.output_tokens) for one in ordered]  # made before the clock runs
    progress = Progress(len(ordered))
    lags_s: list[float] = []
    with kept_garbage():
        start_s, processor_s = time.monotonic() + _LEAD_S, time.process_time()
        sending = _Sending(server, dialect.path, start_s, progress, on_end)
        ticker = asyncio.create_task(_tick(lags_s, progress, on_tick))
        feeder = asyncio.create_task(sending.feed(ordered, bodies))
        stopper = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({feeder, stopper}, return_when=asyncio.FIRST_COMPLETED)
            feeder.cancel()
            rest = asyncio.gather(*sending.open, return_exceptions=True)
            await asyncio.wait((asyncio.ensure_future(rest), stopper), return_when=asyncio.FIRST_COMPLETED)
            await sending.end()
            await rest
        finally:
            for task in (ticker, feeder, stopper):
                task.cancel()
            await asyncio.gather(ticker, feeder, stopper, return_exceptions=True)
    took_s = time.monotonic() - start_s
    outcomes = sorted(sending.outcomes, key=lambda one: one.answer.arrival_s)
    lag = client_lag(
        rate,
        [one.answer.arrival_s for one in outcomes],
        [one.sent_s for one in outcomes],
        lags_s,
        (time.process_time() - processor_s) / max(took_s, 1e-9),
    )
    return Run(rate, start_s, outcomes, lag, len(ordered) - len(outcomes))


def _outcome(prompt: TimedPrompt, due_s: float) -> Outcome:
    return Outcome(prompt.number, prompt.output_tokens, Answer(due_s, prompt.prompt_tokens), due_s)


class _Sending:
    """The requests of one run that were sent."""

    def __init__(
        self, server: Server, path: str, start_s: float, progress: Progress, on_end: Callable[[Outcome, float], None]
    ) -> None:
        self._server = server
        self._path = path
        self._start_s = start_s
        self._progress = progress
        self._on_end = on_end
        self.outcomes: list[Outcome] = []
        self.open: set[asyncio.Task[None]] = set()

    async def feed(self, prompts: Sequence[TimedPrompt], bodies: list[bytes]) -> None:
        """Begin every request when it is due."""
        for prompt, body in zip(prompts, bodies, strict=True):
            due_s = self._start_s + prompt.due_s
            await asyncio.sleep(0)
            while (left_s := due_s - time.monotonic()) > 0:  # timers of whole milliseconds may be early
                await asyncio.sleep(left_s)
            outcome = _outcome(prompt, due_s)
            task = asyncio.create_task(self._one(outcome, body))
            self.open.add(task)
            task.add_done_callback(self.open.discard)

    async def end(self) -> None:
        """Break off what is open."""
        left = list(self.open)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _one(self, outcome: Outcome, body: bytes) -> None:
        progress = self._progress
        progress.sent += 1
        self.outcomes.append(outcome)

        def count(tokens: int) -> None:
            progress.tokens += tokens

        try:
            await self._server.ask(self._path, body, outcome, count)
        except asyncio.CancelledError:
            outcome.fail(INTERRUPTED, "the run was stopped")
            raise
        finally:
            progress.ended += 1
            progress.failed += not outcome.ok
            self._on_end(outcome, self._start_s)


async def _tick(lags_s: list[float], progress: Progress, on_tick: Callable[[Progress], None]) -> None:
    """Sleep again and again and note by how much too long."""
    told_s = time.monotonic()
    while True:
        before_s = time.monotonic()
        await asyncio.sleep(_TICK_S)
        now_s = time.monotonic()
        lags_s.append(max(0.0, now_s - before_s - _TICK_S))
        if now_s - told_s >= _TELL_S:
            told_s = now_s
            on_tick(progress)
