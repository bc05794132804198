"""Runs at several rates against one server, until they are done or somebody stops them.

Knows nothing about command lines or tables. Ctrl-C (or SIGTERM) ends the run that is on, with what there is; again, it
ends the process.
"""

import asyncio
import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bulletserve.client import replay as replaying
from bulletserve.client.dialect import Dialect
from bulletserve.client.outcome import BROKEN, Outcome
from bulletserve.client.prompts import TimedPrompt
from bulletserve.client.report import RateResult, judge
from bulletserve.client.server import Server
from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo

_FILES_BESIDE = 100


@dataclass(frozen=True)
class Wanted:
    """The server and how it is asked. `model` None: the first that it lists; `extra`: more fields of every body."""

    url: str
    api_key: str | None
    timeout_s: float
    model: str | None
    chat: bool
    extra: Mapping[str, Any]
    slo: Slo


class RequestLines:
    """A file of one JSON line a request, written as it ends. A disk that is full ends the file, not the run.

    `broke`: why the file is not whole, "" while it is.
    """

    def __init__(self, path: Path | None) -> None:
        self.broke = ""
        try:
            self._file = None if path is None else path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"--jsonl {path}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, line: dict[str, object]) -> None:
        """Write a line, past all buffers."""
        if self._file is None:
            return
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        try:
            whole = self._file.write(data) == len(data)
            reason = "the disk is full"
        except OSError as error:
            whole, reason = False, error.strerror or str(error)
        if not whole:
            self.broke = reason
            print(f"bullet: --jsonl: {reason}; no more is written there", file=sys.stderr)
            self._file.close()
            self._file = None


def measure(
    wanted: Wanted,
    prompts_of: Callable[[int], Sequence[TimedPrompt]],
    rates: Sequence[float],
    lines: RequestLines,
    results: list[RateResult],
) -> Dialect:
    """Run the prompts, due one a second in the mean, at every rate, and add to `results`; the dialect that was spoken.

    A server that is gone is asked nothing more.

    `prompts_of(run)`: the prompts of run 1, 2, ...; of run 0 the first tries the server out. Raises `ServerRefuses`.
    uvloop, where there is one, saves about an eighth of the processor time per token (benchmarks/bench_client.py).
    """
    work = _measure(wanted, prompts_of, rates, lines, results)
    if find_spec("uvloop") is None:
        return asyncio.run(work)
    import uvloop

    return uvloop.run(work)


async def _measure(
    wanted: Wanted,
    prompts_of: Callable[[int], Sequence[TimedPrompt]],
    rates: Sequence[float],
    lines: RequestLines,
    results: list[RateResult],
) -> Dialect:
    stop = asyncio.Event()
    async with Server(wanted.url, wanted.api_key, wanted.timeout_s) as server:
        dialect = Dialect(wanted.model or await server.model(), wanted.chat, wanted.extra)
        dialect = await replaying.find_dialect(server, dialect, prompts_of(0)[0])
        _stop_on_signals(stop)
        for number, rate in enumerate(rates, 1):
            prompts = prompts_of(number)
            _allow_open_files(len(prompts) + _FILES_BESIDE)

            def on_end(outcome: Outcome, start_s: float, rate: float = rate) -> None:
                lines.add(outcome.line(start_s, wanted.slo, rate))

            at_rate = [replace(one, due_s=one.due_s / rate) for one in prompts]
            with _bar() as bar:
                run = await replaying.replay(server, dialect, at_rate, rate, stop, on_end, _mover(bar, rate))
            broken = any(outcome.kind in BROKEN for outcome in run.outcomes)
            gone = broken and not stop.is_set() and not await server.is_there()
            results.append(judge(run, wanted.slo, len(prompts), server_gone=gone))
            if gone or stop.is_set():
                break
    return dialect


def _stop_on_signals(stop: asyncio.Event) -> None:
    """Let the first Ctrl-C or SIGTERM stop the runs; the next does what it always did."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        for name in _SIGNALS:
            loop.remove_signal_handler(name)

    for name in _SIGNALS:
        loop.add_signal_handler(name, on_signal)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _bar(console: Console | None = None) -> Progress:
    """A bar on the terminal. It is drawn by the client's own loop, twice a second: a thread would make that late."""
    columns = (TextColumn("{task.description}"), BarColumn(None), TextColumn("{task.fields[told]}"))
    console = console or Console(stderr=True)
    return Progress(*columns, TimeElapsedColumn(), console=console, auto_refresh=False, transient=True)


def _mover(bar: Progress, rate: float) -> Callable[[replaying.Progress], None]:
    task = bar.add_task(f"{rate:g} req/s", total=None, told="")

    def move(at: replaying.Progress) -> None:
        if bar.console.is_terminal:
            failed = f", {at.failed} failed" if at.failed else ""
            told = f"{at.ended}/{at.total} ended, {at.sent - at.ended} open, {at.tokens} tokens{failed}"
            bar.update(task, total=at.total, completed=at.ended, told=told, refresh=True)

    return move


def _allow_open_files(wanted: int) -> None:
    """Ask the system for so many open files, a connection each, as far as it lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
