"""`bullet serve`: an OpenAI-compatible HTTP server over one engine process.

This process is the front; the engine is its child (`watched_engine`). Knows which part gets what of the command line,
and what signals mean.
"""

import argparse
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from bulletserve.commands.foreign_flags import add_foreign_arguments
from bulletserve.commands.numbers import number
from bulletserve.commands.options import POLICY_HELP, add_engine_arguments, engine_config
from bulletserve.commands.outputs import check_outputs
from bulletserve.commands.server_options import add_server_arguments, read_text, server_settings
from bulletserve.commands.watched_engine import WatchedEngine
from bulletserve.core.errors import ConfigError
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.formats.description import Checkpoint, GenerationDefaults
from bulletserve.scheduler.policies import make_policy
from bulletserve.server.request_facts import Watcher
from bulletserve.server.request_log import JsonLines, RequestLog
from bulletserve.server.serve import HttpServer, bind
from bulletserve.server.text_codec import TextCodec
from bulletserve.server.tracing import Tracing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Engine flags, server flags, policy and targets."""
    add_engine_arguments(parser)
    group = parser.add_argument_group("scheduling")
    group.add_argument("--policy", default="static_split", help=f"{POLICY_HELP} (%(default)s)")
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
    engine = WatchedEngine(config, record)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # while loading: as Ctrl-C
    try:
        _say(f"loading {checkpoint.name} ...")
        info = engine.start()
        server = HttpServer(engine.front_end, info, codec, settings, defaults, listener, watchers)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: engine.end(server))
        _say(f"{info.describe()}, policy {info.policy}", *info.notes)
        host = f"[{options.host}]" if ":" in options.host else options.host
        _say(f"ready: http://{host}:{server.port}/v1, model {settings.served_names[0]}")
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


def _say(*lines: str) -> None:
    """For whoever looks on; a full disk or a closed pipe is no reason not to serve."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
