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
from dataclasses import replace
from pathlib import Path

from bulletserve.commands.foreign_flags import add_foreign_arguments
from bulletserve.commands.numbers import number
from bulletserve.commands.options import add_engine_arguments, engine_config
from bulletserve.commands.outputs import check_outputs
from bulletserve.commands.server_options import add_server_arguments, read_text, server_settings
from bulletserve.core.config import EngineConfig
from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.errors import BulletError, ConfigError
from bulletserve.engine_process import EXIT_FAULT, EngineProcess
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.formats.description import Checkpoint, GenerationDefaults
from bulletserve.scheduler.policies import make_policy
from bulletserve.server.request_facts import Watcher
from bulletserve.server.request_log import JsonLines, RequestLog
from bulletserve.server.serve import HttpServer, bind
from bulletserve.server.text_codec import TextCodec
from bulletserve.server.tracing import Tracing
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
    add_server_arguments(parser)
    add_foreign_arguments(parser)
    group = parser.add_argument_group("checkpoint")
    group.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as MODEL")
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the hub; or MODEL@NAME")
    group.add_argument("--tokenizer", metavar="MODEL", help="the checkpoint whose tokenizer is used instead")
    group.add_argument(
        "--generation-config",
        choices=("auto", "vllm"),
        default="auto",
        help="auto: sampling values that requests leave out are the checkpoint's; vllm: neutral ones",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Exit status 0, or 70 after the engine died twice."""
    _set_up_log(options)
    options.model = _model(options)
    config = engine_config(options, options.policy)
    make_policy(config.policy)  # a wrong one is told before anything is started
    record = _checked_record(options.record)
    checkpoint = open_checkpoint(config.model, config.load_format)
    codec = _codec(options, checkpoint)
    settings = server_settings(options, checkpoint.name, config.slo)
    defaults = checkpoint.generation_defaults if options.generation_config == "auto" else GenerationDefaults()
    watchers = _watchers(options)
    listener = bind(settings.host, settings.port)
    engine = _Engine(config, record)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # while loading: as Ctrl-C
    try:
        print(f"loading {checkpoint.name} ...", flush=True)
        info = engine.start()
        server = HttpServer(engine.front_end, info, codec, settings, defaults, listener, watchers)
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
        for watcher in watchers:
            if isinstance(watcher, Tracing):
                watcher.close()


def _set_up_log(options: argparse.Namespace) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if options.log_format == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=options.log_level.upper(), handlers=[handler])
    uvicorn_level = options.uvicorn_log_level or ("debug" if options.log_level == "debug" else "warning")
    logging.getLogger("uvicorn").setLevel(uvicorn_level.upper())


def _watchers(options: argparse.Namespace) -> list[Watcher]:
    watchers: list[Watcher] = [RequestLog(every=options.enable_log_requests)]
    if options.otlp_traces_endpoint is not None:
        watchers.append(Tracing.to(options.otlp_traces_endpoint))
    return watchers


def _model(options: argparse.Namespace) -> str | None:
    """The model that is named, wherever it is."""
    if None not in (options.model, options.model_flag):
        raise ConfigError(f"two models: {options.model} and --model {options.model_flag}")
    _check_names(options)
    model: str | None = options.model or options.model_flag
    if options.revision is None:
        return model
    if model is None or Path(model).exists():
        raise ConfigError(f"--revision {options.revision} is for a name on the hub, such as org/model")
    return f"{model}@{options.revision}"


def _codec(options: argparse.Namespace, checkpoint: Checkpoint) -> TextCodec:
    """The checkpoint's, but for what the flags replace."""
    template = None
    if options.chat_template is not None:
        template = read_text(options.chat_template, "--chat-template")
    if options.tokenizer is not None:
        other = open_checkpoint(options.tokenizer, "dummy")
        if other.tokenizer is None:
            raise ConfigError(f"--tokenizer {options.tokenizer}: there is no tokenizer")
        chat_template = checkpoint.chat_template or other.chat_template
        checkpoint = replace(checkpoint, tokenizer=other.tokenizer, chat_template=chat_template)
    return TextCodec.from_checkpoint(checkpoint, template, plain_messages=options.plain_messages)


def _check_names(options: argparse.Namespace) -> None:
    """`--served-model-name` takes all that follows it: a model written there would never be looked at."""
    for name in options.served_model_name or ():
        if options.model is None and options.model_flag is None and (name.endswith(".gguf") or Path(name).exists()):
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
