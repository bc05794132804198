"""Runs the HTTP front in this process: listening socket, uvicorn, an orderly end.

Knows nothing about the engine process, signals or the command line: whoever starts the engine watches it and tells
this server through `engine_died` and `engine_ready`, which may be called from any thread.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.errors import ConfigError
from bulletserve.core.garbage import frozen_garbage
from bulletserve.formats.description import GenerationDefaults
from bulletserve.server.app import create_app
from bulletserve.server.connection import limited_connections
from bulletserve.server.open_requests import OpenRequests
from bulletserve.server.request_body import Bodies
from bulletserve.server.request_facts import Watcher
from bulletserve.server.settings import ServerSettings
from bulletserve.server.text_codec import TextCodec
from bulletserve.telemetry.metrics import Metrics
from bulletserve.transport.front_end import FrontEnd

_BACKLOG = 2048
_LAST_WRITES_S = 2
_KEEP_ALIVE_S = 65
"""Longer than clients and balancers keep idle connections, so that they close first and never send into a close."""

_LOOK_EVERY_S = 0.02
_SWITCH_S = 5e-4

_log = logging.getLogger(__name__)


class HttpServer:
    """The HTTP front over one engine.

    Takes over `listener` (from `bind`), or binds at once: raises `ConfigError` if the address cannot be had.
    `port` is the real one, also where 0 was asked for. An engine that died is closed here; after `run` the last one
    is the caller's again, to stop and to close. `watchers` are told of each HTTP request when it has ended.
    """

    def __init__(
        self,
        engine: FrontEnd,
        info: EngineInfo,
        codec: TextCodec,
        settings: ServerSettings,
        defaults: GenerationDefaults = GenerationDefaults(),  # noqa: B008 (frozen)
        listener: socket.socket | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self._settings = settings
        self.open_requests = OpenRequests(
            engine,
            info,
            Metrics(settings.served_names[0]),
            max_waiting=settings.max_waiting,
            status_limit_s=settings.status_limit_s,
            step_limit_s=settings.step_limit_s,
        )
        self._bodies = Bodies(settings)
        self.app = create_app(self.open_requests, codec, settings, self._bodies, defaults, watchers)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                self.app,
                http=limited_connections(settings.header_timeout_s, settings.write_timeout_s),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_WRITES_S,
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.RLock()  # a signal handler may interrupt its own thread
        self._early: list[Callable[[], None]] = []
        self._ended = False
        self._shutdown: asyncio.Task[None] | None = None
        self._socket = listener or bind(settings.host, settings.port)
        self.port: int = self._socket.getsockname()[1]

    def run(self) -> None:
        """Serve until `shutdown`; blocks. Installs no signal handlers.

        What is there at the start (a vocabulary's hundred thousand strings) is no matter for the garbage collector: to
        look through it would take tens of milliseconds, from every stream.
        """
        try:
            with (
                frozen_garbage(),
                _quick_switches(),
                asyncio.Runner(loop_factory=self._uvicorn.config.get_loop_factory()) as runner,
            ):
                runner.run(self._serve())
        finally:
            self._socket.close()

    def shutdown(self, grace_s: float | None = None) -> None:
        """Refuse new requests, give open ones `grace_s` (default: the settings'), end the rest with an error, return
        from `run`. Any thread, signal handlers too; a second call ends the grace.
        """
        self._on_loop(lambda: self._begin_shutdown(self._settings.grace_s if grace_s is None else grace_s))

    def engine_died(self, message: str) -> None:
        """The engine process is gone: open requests end with an error within a second. Any thread."""
        self._on_loop(lambda: self.open_requests.engine_died(message))

    def engine_ready(self, engine: FrontEnd, info: EngineInfo) -> None:
        """A new engine process is ready. Any thread."""
        self._on_loop(lambda: self.open_requests.replace_engine(engine, info))

    async def _serve(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
        for work in self._early:
            work()
        try:
            await self._uvicorn.serve([self._socket])
        finally:
            self._ended = True

    def _on_loop(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._loop is None:
                self._early.append(work)
                return
        if not self._ended:
            with contextlib.suppress(RuntimeError):  # it has just closed
                self._loop.call_soon_threadsafe(work)

    def _begin_shutdown(self, grace_s: float) -> None:
        if self._shutdown is not None:
            grace_s = 0.0
        self._shutdown = asyncio.ensure_future(self._drain(grace_s))

    async def _drain(self, grace_s: float) -> None:
        self.open_requests.refuse_new()
        self._bodies.end()
        left = len(self.open_requests)
        if left and grace_s:
            _log.warning("shutting down: open requests have up to %g s, another signal ends them (%d)", grace_s, left)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        while len(self.open_requests) and loop.time() < deadline:
            await asyncio.sleep(_LOOK_EVERY_S)
        self.open_requests.end_all()
        self._uvicorn.should_exit = True


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    """Threads that tokenise give way to the streams within half a millisecond, not five."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to whoever runs us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError` if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({os.strerror(error.errno or 0)}): use --host or --port"
        ) from None
