"""Streams and events without a GPU: a stream is a thread that does what is queued on it, in order.

As on a GPU, queueing never waits, an event holds what was queued before it was recorded, waiting for an event that was
never recorded waits for nothing, and a wait stays with the recording that it met.
"""

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from queue import SimpleQueue

import pytest
import torch

_current = threading.local()


class FakeStream:
    """One stream. `name` is for tests."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def wait_event(self, event: "FakeEvent") -> None:
        recording = event.recording
        if recording is not None:
            self.put(lambda: _must(recording.wait(10)))

    def end(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


class FakeEvent:
    """A timed event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.recording: threading.Event | None = None
        self.at_s = 0.0

    def record(self) -> None:
        recording = self.recording = threading.Event()

        def happen() -> None:
            self.at_s = time.monotonic()
            recording.set()

        current_stream().put(happen)

    def synchronize(self) -> None:
        if self.recording is not None:
            _must(self.recording.wait(10))

    def elapsed_time(self, other: "FakeEvent") -> float:
        return (other.at_s - self.at_s) * 1e3


def current_stream() -> FakeStream:
    """The stream of the calling thread."""
    return _current.stream


@contextmanager
def on_stream(stream: FakeStream):
    before = getattr(_current, "stream", None)
    _current.stream = stream
    yield
    _current.stream = before


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.cuda have these streams and events."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def _must(happened: bool) -> None:
    assert happened, "waited in vain"
