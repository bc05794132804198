"""Writes a run down while it happens, from a thread of its own.

Knows nothing about policies. The loop hands over references and goes on: nothing is encoded, hashed or written on its
thread. What waits to be written is bounded, in turns and in tokens; a disk that is full or too slow ends the recording,
with a warning and without any effect on serving, because a record with holes would be none.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from bulletserve.core.errors import ConfigError
from bulletserve.core.events import Arrived, Event, StepDone
from bulletserve.core.plan import Plan
from bulletserve.telemetry.record_format import LineWriter

MOST_TURNS = 40_000
MOST_TOKENS = 8_000_000
"""Most that may wait to be written: a minute of a busy engine, about 64 MB of ids."""

_log = logging.getLogger(__name__)

_Item = tuple[float, Sequence[Event], Sequence[Plan]]


class Recorder:
    """An observer of `scheduler/loop`: call it once a turn, from one thread. `close` writes what is left.

    Raises `ConfigError` if the file cannot be made or holds something. `stopped`: why recording has ended early, ""
    while it has not.
    """

    def __init__(
        self, path: Path, header: Mapping[str, Any], most_turns: int = MOST_TURNS, most_tokens: int = MOST_TOKENS
    ) -> None:
        self.path = path
        self.stopped = ""
        self._most_turns, self._most_tokens = most_turns, most_tokens
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._given = self._written = 0  # tokens; each counted by one thread only
        self._lines = LineWriter()
        with ExitStack() as undo:
            try:
                self._file = _open_new(path)
                undo.callback(_give_up, self._file)
                self._file.write(self._lines.header(header))
                self._file.flush()
            except FileExistsError:
                raise ConfigError(f"a record would overwrite {path}: name a new file") from None
            except OSError as error:
                raise ConfigError(f"a record cannot be written to {path}: {error.strerror or error}") from None
            undo.pop_all()
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    def __call__(self, now_s: float, events: Sequence[Event], plans: Sequence[Plan]) -> None:
        """Note a turn; never blocks."""
        if self.stopped:
            return
        self._given += _tokens(events)
        if self._queue.qsize() >= self._most_turns or self._given - self._written > self._most_tokens:
            self._stop("the disk is too slow for what happens")
        else:
            self._queue.put((now_s, events, plans))

    def close(self) -> None:
        """Write what was noted and close the file."""
        self._queue.put(None)
        self._thread.join()
        try:
            if not self.stopped:
                self._file.write(self._lines.end())
                self._file.flush()
        except OSError as error:
            self._stop(error.strerror or str(error))
        _give_up(self._file)

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if self.stopped:
                continue
            try:
                self._file.write(self._lines.turn(*item))
                self._written += _tokens(item[1])
                if self._queue.empty():
                    self._file.flush()
            except OSError as error:
                self._stop(error.strerror or str(error))
            except Exception as error:  # a turn that cannot be written must not end serving
                self._stop(repr(error))

    def _stop(self, why: str) -> None:
        if not self.stopped:
            self.stopped = why
            _log.warning("recording to %s has ended: %s; serving goes on", self.path, why)


def _open_new(path: Path) -> BinaryIO:
    """Raises `FileExistsError` where something would be lost; an empty file may have been made for us."""
    try:
        return path.open("xb")
    except FileExistsError:
        if path.stat().st_size:
            raise
        return path.open("wb")


def _give_up(file: BinaryIO) -> None:
    """Close a file whether or not what is left of it can be written."""
    with suppress(OSError):
        file.close()


def _tokens(events: Sequence[Event]) -> int:
    """How much an event keeps in memory, roughly."""
    total = 0
    for event in events:
        if isinstance(event, StepDone):
            total += len(event.tokens)
        elif isinstance(event, Arrived):
            total += len(event.request.prompt_ids)
    return total
