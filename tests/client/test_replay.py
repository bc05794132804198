"""A run: requests leave when they are due, failures stay theirs, Ctrl-C and a slow client are told."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from bulletserve.client import replay as replaying
from bulletserve.client.dialect import Dialect
from bulletserve.client.outcome import Outcome
from bulletserve.client.prompts import TimedPrompt
from bulletserve.client.replay import Progress, Run, replay
from bulletserve.client.server import Server
from tests.client.fake_server import STREAM, FakeServer, Script, answers, says, status, token

DIALECT = Dialect("fake")


def prompts(times_s: Sequence[float], output_tokens: int = 3) -> list[TimedPrompt]:
    return [TimedPrompt(number, due_s, [number], 1, output_tokens) for number, due_s in enumerate(times_s)]


def run(
    script: Any, asked: Sequence[TimedPrompt], stop_at: Callable[[Progress], bool] = lambda at: False, **calls: Any
) -> tuple[Run, list[dict[str, Any]]]:
    async def measured(url: str) -> Run:
        stop = asyncio.Event()

        def on_tick(at: Progress) -> None:
            calls.get("on_tick", lambda at: None)(at)
            if stop_at(at):
                stop.set()

        async with Server(f"{url}/v1", timeout_s=20) as server:
            return await replay(server, DIALECT, asked, 10.0, stop, **(calls | {"on_tick": on_tick}))

    with FakeServer(script) as fake:
        return asyncio.run(measured(fake.url)), fake.bodies


def test_every_request_leaves_when_it_is_due_and_never_before() -> None:
    asked = prompts([0.3, 0.0, 0.05, 0.05, 0.2])
    done, bodies = run(lambda number, body: answers(), asked)
    asked_for = [body["prompt"][0] for body in bodies]
    assert (asked_for[0], set(asked_for[1:3]), asked_for[3:]) == (1, {2, 3}, [4, 0])
    due = {one.number: one.answer.arrival_s - done.start_s for one in done.outcomes}
    assert due == pytest.approx({0: 0.3, 1: 0.0, 2: 0.05, 3: 0.05, 4: 0.2})
    assert all(one.ok and one.sent_s >= one.answer.arrival_s for one in done.outcomes)
    assert [one.answer.arrival_s for one in done.outcomes] == sorted(one.answer.arrival_s for one in done.outcomes)
    assert not done.interrupted and done.lag.asked_rate == 10.0


def test_failures_of_single_requests_end_nothing() -> None:
    scripts: list[Script] = [answers(), status(429, b"{}"), says(STREAM, token()), says(), status(500, b""), answers()]
    progress: list[Progress] = []
    ended: list[tuple[int, str]] = []
    done, _ = run(
        lambda number, body: scripts[body["prompt"][0]],
        prompts([0.0, 0.01, 0.02, 0.03, 0.04, 2.5]),
        on_end=lambda outcome, start_s: ended.append((outcome.number, outcome.kind)),
        on_tick=lambda at: progress.append(replace(at)),
    )
    kinds = ["ok", "http_429", "cut", "connect", "http_500", "ok"]
    assert [one.kind for one in done.outcomes] == kinds
    assert sorted(ended) == list(enumerate(kinds)), "each is told once, when it ends"
    assert Progress(6, sent=5, ended=5, failed=4, tokens=4) in progress


def test_a_stop_keeps_what_there_is() -> None:
    async def hangs(writer: Any, body: dict[str, Any]) -> None:
        writer.write(STREAM + token())
        await asyncio.sleep(60)

    lines: list[Outcome] = []
    done, _ = run(
        lambda number, body: answers() if body["prompt"] == [0] else hangs,
        prompts([0.0, 0.01, 30.0, 31.0]),
        stop_at=lambda at: at.tokens == 4,
        on_end=lambda outcome, start_s: lines.append(outcome),
    )
    assert [one.kind for one in done.outcomes] == ["ok", "interrupted"]
    assert len(done.outcomes[1].answer.token_times_s) == 1, "what had come is kept"
    assert done.left_out == 2 and done.interrupted and len(lines) == 2


def test_a_client_that_sleeps_over_its_tokens_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something in the process blocks the loop for 60 ms out of 80: lateness and loop lag show it."""

    async def busy() -> None:
        while True:
            time.sleep(0.06)
            await asyncio.sleep(0.02)

    async def beside(lags_s: list[float], *rest: Any) -> None:
        blocker = asyncio.create_task(busy())
        try:
            await tick(lags_s, *rest)
        finally:
            blocker.cancel()

    tick = replaying._tick
    monkeypatch.setattr(replaying, "_tick", beside)
    done, _ = run(lambda number, body: answers(), prompts([0.01 * n for n in range(40)]))
    assert all(one.ok for one in done.outcomes)
    assert done.lag.late_p99_s > 0.03 and done.lag.loop_p99_s > 0.03
    words = done.lag.trouble(0.02)
    assert words is not None and "requests left" in words and "event loop" in words
    assert done.lag.trouble(1e3) is None
    ttfts = [one.answer.ttft_s for one in done.outcomes]
    assert max(ttfts) > 0.03, "time lost by the client is in the latencies, not hidden"


def test_all_at_once_is_not_late() -> None:
    done, bodies = run(lambda number, body: answers(), prompts([0.0] * 50))
    assert len(bodies) == 50 and all(one.ok for one in done.outcomes)
    assert replace(done.lag, asked_rate=float("inf"), loop_p99_s=0.0, late_p99_s=9.0).trouble() is None
    assert replace(done.lag, asked_rate=5.0, loop_p99_s=0.0, late_p99_s=9.0).trouble() is not None
