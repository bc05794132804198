"""An engine's loop on a thread of this process, which ends before the interpreter does.

Knows nothing about prompts. Python stops daemon threads wherever they next ask for the GIL; one that is inside torch
then unwinds through C++ that must not be unwound, and the process aborts (status 134, in half of the runs that ended
right behind an answer). So whatever still runs when the interpreter ends is closed first, and so is what nobody can
reach any more.
"""

import atexit
import threading
import weakref
from queue import SimpleQueue

from bulletserve.compose import Engine
from bulletserve.core.errors import EngineError
from bulletserve.core.events import Output, Status, Stop
from bulletserve.scheduler.loop import what_failed

_LAST_STEP_S = 10.0
"""How long the interpreter's end waits for a loop: a device that hangs must not keep the process."""

_LAST_WORDS_S = 0.5

_open: "set[LoopThread]" = set()


class _Outputs:
    """An outlet that hands outputs to whoever waits."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Output | EngineError] = SimpleQueue()

    def emit(self, output: Output) -> None:
        self.queue.put(output)

    def report(self, status: Status) -> None:
        """Nobody asks."""


class LoopThread:
    """Runs `engine` from the start until `close`; closes itself when nobody can reach `owner` any more.

    `outputs`: what the loop says, last of all an `EngineError` with the reason why it ended.
    """

    def __init__(self, engine: Engine, owner: object) -> None:
        outlet = _Outputs()
        self.outputs = outlet.queue
        self._engine = engine
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=_run, args=(engine, outlet), name="bullet-loop", daemon=True)
        weakref.finalize(owner, self._close_beside).atexit = False
        _open.add(self)
        self._thread.start()

    def has_ended(self) -> bool:
        """Whether it is over, or about to be: what it says last comes a moment before."""
        self._thread.join(_LAST_WORDS_S)
        return not self._thread.is_alive()

    def close(self, timeout_s: float | None = None) -> None:
        """End the loop and the lanes, once what runs has ended. After `timeout_s` nobody waits. May be called again."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            _open.discard(self)
            self._engine.inbox.post(Stop())
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._engine.close()

    def _close_beside(self) -> None:
        """From the garbage collector, which works on any thread: one that `close` waits for may be among them."""
        if not self._closed:
            threading.Thread(target=self.close, name="bullet-close").start()


def _run(engine: Engine, outlet: _Outputs) -> None:
    try:
        fault = engine.loop(outlet).run() or "the engine was closed"
    except BaseException as error:  # whatever ends this thread, somebody waits for its last word
        fault = what_failed(error)
    outlet.queue.put(EngineError(fault))


@atexit.register
def _close_all() -> None:
    for running in tuple(_open):
        running.close(_LAST_STEP_S)
