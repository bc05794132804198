"""The engine in a process of its own: how the front starts it, and what runs in it.

Knows nothing about HTTP. The child lives as long as its parent keeps the child's standard input open: when the
parent dies, however it dies, the pipe closes and the child ends.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import BulletError, PolicyError
from bulletserve.core.garbage import Collection, frozen_garbage, kept_garbage
from bulletserve.telemetry.recorder import Recorder
from bulletserve.transport.addresses import Addresses

if TYPE_CHECKING:
    from bulletserve.compose import Engine
    from bulletserve.scheduler.loop import Loop, Observer

_log = logging.getLogger(__name__)

_LAST_CHANCE_S = 10.0

EXIT_FAULT = 70
"""Exit status after a fault of the device or a failure of the scheduler."""

EXIT_CONFIG = 78
"""Exit status when the engine could not be built as asked."""


class EngineProcess:
    """A running child. `addresses` are where its front listens; `record`: where it writes its decisions down."""

    def __init__(
        self,
        config: EngineConfig,
        addresses: Addresses,
        log_level: int = logging.WARNING,
        record: Path | None = None,
    ) -> None:
        order = json.dumps(
            {
                "config": asdict(config),
                "addresses": asdict(addresses),
                "log_level": log_level,
                "record": None if record is None else str(record),
            }
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bulletserve.engine_process"], stdin=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            _log.error("the engine process ended at once")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def wait(self) -> int:
        """Block until it has ended; its exit status (negative: the signal that killed it)."""
        return self._process.wait()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def stop(self, grace_s: float = 5.0) -> None:
        """Let it end by itself for `grace_s`, then kill it. Returns when it is gone."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> int:
    """Read the order from standard input, build the engine, run its loop. The exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the front decides when we end
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.readline()
    if not line:
        return EXIT_CONFIG
    order = json.loads(line)
    logging.basicConfig(level=order["log_level"], format="%(asctime)s engine %(levelname)s %(message)s")
    record = None if order["record"] is None else Path(order["record"])
    return _serve(EngineConfig(**order["config"]), Addresses(**order["addresses"]), record)


def _serve(config: EngineConfig, addresses: Addresses, record: Path | None) -> int:
    # torch is only wanted in this process
    from bulletserve.compose import build_engine, record_to
    from bulletserve.core.events import Stop
    from bulletserve.scheduler.inbox import QueueInbox
    from bulletserve.scheduler.loop import both
    from bulletserve.transport.engine_end import EngineEnd

    inbox = QueueInbox()
    end = EngineEnd(addresses, inbox, block_size=config.block_size if config.enable_prefix_caching else None)
    _watch_parent(lambda: inbox.post(Stop()))
    recorder: Recorder | None = None
    try:
        engine = build_engine(config, inbox)
        loop = engine.loop(end)
        _warm_grammars(engine)
        if record is not None:
            recorder = record_to(record, engine, loop)
        loop.observer = both(_collector(loop), recorder)
        with frozen_garbage(), kept_garbage():
            end.ready(engine.info)
            fault = loop.run()
        if fault:
            end.fatal(fault)
            return EXIT_FAULT
        engine.close()
        return 0
    except PolicyError as error:
        _log.exception("the engine failed")  # whoever wrote the policy needs its lines
        end.fatal(str(error))
        return EXIT_FAULT
    except BulletError as error:
        end.fatal(str(error))
        return EXIT_CONFIG
    except Exception as error:
        _log.exception("the engine failed")
        end.fatal(f"{type(error).__name__}: {error}")
        return EXIT_FAULT
    finally:
        if recorder is not None:
            recorder.close()
        end.close()


def _collector(loop: "Loop") -> "Observer":
    """An observer of the loop. The scheduler makes no garbage that only a collection finds (a test says so), but others
    may: a library that fails, a policy of somebody else."""
    collection = Collection()

    def told(now_s: float, events: Sequence[object], plans: Sequence[object]) -> None:
        collection.told(now_s, idle=loop.state.is_idle)

    return told


def _warm_grammars(engine: "Engine") -> None:
    """Make the vocabulary before there is traffic: for a second it would hold up whoever launches steps."""
    try:
        engine.guide.warm()
    except BulletError as error:  # whoever asks for a structured answer is told
        _log.warning("no structured answers: %s", error)


def _watch_parent(on_end: Callable[[], None]) -> None:
    """Call `on_end` when the parent closes our standard input or dies; end for good if that does not help."""

    def watch() -> None:
        sys.stdin.read()
        on_end()
        time.sleep(_LAST_CHANCE_S)
        os._exit(EXIT_FAULT)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # lane threads may be in the middle of a step
