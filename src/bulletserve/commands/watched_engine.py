"""The engine process of a server and its successor: an engine that dies is started again, once.

Knows nothing about flags. Every request that a dead engine held ends with an error; when the second one dies the server
exits for its supervisor.
"""

import itertools
import logging
import os
import threading
from pathlib import Path

from bulletserve.core.config import EngineConfig
from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.errors import BulletError
from bulletserve.engine_process import EXIT_FAULT, EngineProcess
from bulletserve.server.serve import HttpServer
from bulletserve.transport.front_end import FrontEnd

READY_TIMEOUT_S = 900.0

_log = logging.getLogger("bulletserve.serve")


class WatchedEngine:
    """The engine process and its successor."""

    def __init__(self, config: EngineConfig, record: Path | None = None) -> None:
        self.status = 0
        self._config, self._record = config, record
        self._starts = 0
        self._ending = threading.Event()

    def start(self) -> EngineInfo:
        """Start a process and wait until it is ready. Raises `EngineDied` with its last words."""
        self.front_end = FrontEnd()
        self._starts += 1
        record = self._record
        if record is not None and self._starts > 1:
            record = next_record(record)
            _log.warning("recording goes on in %s", record)
        self.process = EngineProcess(self._config, self.front_end.addresses, logging.getLogger().level, record)
        return self.front_end.wait_ready(READY_TIMEOUT_S, self.process.alive)

    def end(self, server: HttpServer) -> None:
        """The server was told to end; told again: now."""
        if self._ending.is_set():
            self.kill()
        self._ending.set()
        server.shutdown()

    def kill(self) -> None:
        """End the process without a grace."""
        self._ending.set()
        if hasattr(self, "process"):
            self.process.kill()

    def watch(self, server: HttpServer) -> None:
        """Tell the server when the process dies; start another one, once."""
        threading.Thread(target=self._watch, args=(server,), name="engine-watch", daemon=True).start()

    def close(self) -> None:
        """End the process."""
        self._ending.set()
        if hasattr(self, "process"):
            self.process.stop()
        if hasattr(self, "front_end"):
            self.front_end.close()

    def _watch(self, server: HttpServer) -> None:
        for is_last in (False, True):
            status = self.process.wait()
            server.engine_died(f"its process ended with status {status}")
            if self._ending.is_set():
                return
            _log.error("the engine process ended with status %d", status)
            if is_last:
                break
            try:
                info = self.start()
            except BulletError as error:
                _log.error("the engine could not be started again: %s", error)
                break
            _log.warning("the engine was started again")
            server.engine_ready(self.front_end, info)
        self.status = EXIT_FAULT
        server.shutdown(0.0)


def next_record(path: Path) -> Path:
    """Where an engine that is started again writes: FILE.2, or the next number that nobody has taken, since what led
    to the end of the one before it must be kept, and so must what lies there from another day."""
    taken = (path.with_name(f"{path.name}.{number}") for number in itertools.count(2))
    return next(one for one in taken if not os.path.lexists(one))
