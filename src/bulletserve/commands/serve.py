"""`bullet serve`: an OpenAI-compatible HTTP server over one engine process.

This process is the front; the engine is its child. Knows how the two live and die together: an engine that dies is
started again once, and every request it held ends with an error; when it dies again the server exits for its
supervisor.
"""

import argparse
import itertools
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from bulletserve.commands.numbers import number
from bulletserve.commands.options import add_engine_arguments, engine_config
from bulletserve.commands.outputs import check_outputs
from bulletserve.core.config import EngineConfig
from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.errors import BulletError, ConfigError
from bulletserve.engine_process import EXIT_FAULT, EngineProcess
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.scheduler.policies import make_policy
from bulletserve.server.serve import HttpServer, bind
from bulletserve.server.settings import ServerSettings
from bulletserve.server.text_codec import TextCodec
from bulletserve.server.tool_calls import FORMATS
from bulletserve.transport.front_end import FrontEnd

READY_TIMEOUT_S = 900.0

_log = logging.getLogger("bulletserve.serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Engine flags, server flags, policy and targets."""
    add_engine_arguments(parser)
    group = parser.add_argument_group("scheduling")
    group.add_argument("--policy", default="static_split", help="time_sliced, chunked_prefill, static_split or bullet")
    group.add_argument("--ttft-slo-ms", type=number, help="target for the time to the first token")
    group.add_argument("--tpot-slo-ms", type=number, help="target for the mean time per token after the first")
    group.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write every decision down for bullet replay; holds the tokens of prompts and answers",
    )
    group.add_argument(
        "--slo-class",
        action="append",
        default=[],
        metavar="NAME:TARGETS",
        help="a class that requests may ask for, such as chat:ttft_ms=300,tpot_ms=20; may be repeated",
    )
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000, help="0: any free port")
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help="may be repeated")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="the checkpoint's name by default")
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja2 source instead of the model's own")
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="let the model call tools by itself: with --tool-call-parser",
    )
    group.add_argument("--tool-call-parser", choices=tuple(FORMATS), help="the format in which the model calls tools")
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Exit status 0, or 70 after the engine died twice."""
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if options.log_level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
    config = engine_config(options, options.policy)
    make_policy(config.policy)  # a wrong one is told before anything is started
    record = _checked_record(options.record)
    checkpoint = open_checkpoint(config.model, config.load_format)
    codec = TextCodec.from_checkpoint(checkpoint, _read_template(options.chat_template))
    settings = ServerSettings(
        served_names=tuple(options.served_model_name or [checkpoint.name]),
        host=options.host,
        port=options.port,
        api_keys=tuple(options.api_key),
        slo=config.slo,
        slo_classes=tuple(options.slo_class),
        tool_call_parser=_tool_call_parser(options),
    )
    _check_names(options)
    listener = bind(settings.host, settings.port)
    engine = _Engine(config, record)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # while loading: as Ctrl-C
    try:
        print(f"loading {checkpoint.name} ...", flush=True)
        info = engine.start()
        server = HttpServer(engine.front_end, info, codec, settings, checkpoint.generation_defaults, listener)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: engine.end(server))
        print(f"{info.describe()}, policy {info.policy}", *info.notes, sep="\n", flush=True)
        host = f"[{options.host}]" if ":" in options.host else options.host
        print(f"ready: http://{host}:{server.port}/v1, model {settings.served_names[0]}", flush=True)
        engine.watch(server)
        server.run()
        return engine.status
    except KeyboardInterrupt:
        engine.kill()
        return 0
    finally:
        engine.close()
        listener.close()


def _tool_call_parser(options: argparse.Namespace) -> str | None:
    """The format of calls, if the model may make them. As in vLLM, it takes both flags."""
    if options.enable_auto_tool_choice != (options.tool_call_parser is not None):
        raise ConfigError("--enable-auto-tool-choice and --tool-call-parser need each other")
    parser: str | None = options.tool_call_parser
    return parser


def _check_names(options: argparse.Namespace) -> None:
    """`--served-model-name` takes all that follows it: a model written there would never be looked at."""
    for name in options.served_model_name or ():
        if options.model is None and (name.endswith(".gguf") or Path(name).exists()):
            raise ConfigError(f"{name} is taken for a name: write the model before --served-model-name")


def _checked_record(path: Path | None) -> Path | None:
    """The path of a record, if it can be written. Nothing may be lost in its place."""
    check_outputs({"--record": path}, new=["--record"])
    return None if path is None else path.absolute()


def _next_record(path: Path) -> Path:
    """Where an engine that is started again writes: FILE.2, or the next number that nobody has taken, since what led
    to the end of the one before it must be kept, and so must what lies there from another day."""
    taken = (path.with_name(f"{path.name}.{number}") for number in itertools.count(2))
    return next(one for one in taken if not os.path.lexists(one))


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: {getattr(error, 'strerror', None) or error}") from None


class _Engine:
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
            record = _next_record(record)
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
