"""A lane on a GPU: one thread that launches its steps in order, one that waits for them to end.

Knows nothing about what a step does. Launching never waits for the device: what a step comes after is told to its
stream by events. A lane takes the stream of each step's share; changing it costs one event. The waiting thread
sleeps in the driver, without the GIL, and reports each step with its tokens.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from bulletserve.core.events import StepDone
from bulletserve.core.launch import Launch
from bulletserve.core.ports import Poster
from bulletserve.engine.drawn import Drawn

_log = logging.getLogger(__name__)

Run = Callable[[Launch, Any], Drawn]
"""Queues a step's work, with what was prepared for it, on the current stream; gives what it draws, which lies on the
host once the step has run."""


def _event(*, blocking: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]


@dataclass(slots=True, eq=False)
class GpuTask:
    """A step and what it comes after.

    `launched` is set once its work is queued (or has failed to be), `ended` once its end has been told (or it was
    dropped).
    """

    launch: Launch
    stream: torch.cuda.Stream
    after: Sequence["GpuTask"]
    prepared: Any = None
    start: torch.cuda.Event = field(default_factory=lambda: _event(blocking=False))
    end: torch.cuda.Event = field(default_factory=lambda: _event(blocking=True))
    launched: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    drawn: Drawn = field(default_factory=Drawn)
    error: BaseException | None = None


class GpuLane:
    """The threads and the queue of one lane. `observe` hears of every step that ended (benchmarks, traces)."""

    def __init__(self, name: str, device: torch.device, run: Run, poster: Poster) -> None:
        self.poster = poster
        self.observe: Callable[[GpuTask], None] | None = None
        self._device = device
        self._run = run
        self._closed = False
        self._to_launch: SimpleQueue[GpuTask | None] = SimpleQueue()
        self._to_await: SimpleQueue[GpuTask | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"{name}-{what}", daemon=True)
            for what, target in (("launch", self._launch_all), ("await", self._await_all))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, task: GpuTask) -> None:
        """Queue a step; never blocks."""
        self._to_launch.put(task)

    def close(self) -> None:
        """Drop what is not launched, wait for what is."""
        self._closed = True
        self._to_launch.put(None)
        for thread in self._threads:
            thread.join()

    def _launch_all(self) -> None:
        torch.cuda.set_device(self._device)
        with torch.inference_mode():
            while (task := self._to_launch.get()) is not None:
                dropped = self._closed
                if not dropped:
                    self._launch(task)
                task.launched.set()
                if dropped:
                    task.ended.set()
                else:
                    self._to_await.put(task)
        self._to_await.put(None)

    def _launch(self, task: GpuTask) -> None:
        try:
            for earlier in task.after:
                earlier.launched.wait()
            with torch.cuda.stream(task.stream):
                for earlier in task.after:
                    if earlier.stream is not task.stream and not earlier.ended.is_set():
                        task.stream.wait_event(earlier.end)
                task.start.record()
                try:
                    task.drawn = self._run(task.launch, task.prepared)
                finally:
                    task.end.record()
        except Exception as failure:
            _log.exception("step %d failed", task.launch.step_id)
            task.error = failure

    def _await_all(self) -> None:
        torch.cuda.set_device(self._device)
        while (task := self._to_await.get()) is not None:
            outcome = self._outcome(task)
            # Ends are told in the order of steps, also across lanes: a decode step behind a mixed one goes on with its
            # rows, and may be over before the other lane's thread has woken up to tell of the mixed one.
            for earlier in task.after:
                earlier.ended.wait()
            task.after = ()  # else every task would keep all that ever ran alive
            self.poster.post(outcome)
            task.ended.set()

    def _outcome(self, task: GpuTask) -> StepDone:
        drawn = Drawn()
        took_s = 0.0
        try:
            task.end.synchronize()
            if task.error is None:
                took_s = task.start.elapsed_time(task.end) / 1e3
                drawn = task.drawn
        except Exception as failure:
            if task.error is None:
                _log.exception("step %d failed on the device", task.launch.step_id)
            task.error = failure
        now_s = time.monotonic()
        if self.observe is not None and task.error is None:
            try:
                self.observe(task)
            except Exception:  # the loop must hear of the step whatever an onlooker does
                _log.exception("an observer failed at step %d", task.launch.step_id)
        error = "" if task.error is None else f"the engine failed at this step: {task.error}"
        step_id, fatal = task.launch.step_id, is_fault(task.error)
        told, of_prompts = drawn.told(), drawn.told_of_prompts()
        return StepDone(step_id, drawn.token_ids(), now_s - took_s, now_s, error, fatal, told, of_prompts)


def is_fault(error: BaseException | None) -> bool:
    """Whether an error leaves the device unusable: CUDA reports a fault at every call after it."""
    if error is None:
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
