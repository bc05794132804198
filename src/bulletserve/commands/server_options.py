"""The flags of the HTTP front, and how they become its settings.

Knows nothing about engines. Names are vLLM's where it has one for the same thing.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from bulletserve.commands.numbers import Whole, any_whole, number
from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo
from bulletserve.server.call_formats import FORMATS
from bulletserve.server.settings import ServerSettings

API_KEY_VARIABLE = "BULLET_API_KEY"

_DEFAULTS = ServerSettings(("model",))


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Address, names, limits, log."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default=_DEFAULTS.host, help="address to listen on (%(default)s)")
    group.add_argument("--port", type=Whole(0, 65535), default=_DEFAULTS.port, help="0: any free port (%(default)s)")
    group.add_argument("--root-path", default="", metavar="PATH", help="what a proxy puts before every path")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="the checkpoint's name by default")
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja2 source instead of the model's own")
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="let the model call tools by itself: with --tool-call-parser",
    )
    group.add_argument("--tool-call-parser", choices=tuple(FORMATS), help="the format in which the model calls tools")
    group.add_argument(
        "--trust-request-chat-template", action="store_true", help="requests may bring chat templates: programs"
    )
    group.add_argument(
        "--plain-messages", action="store_true", help="control tokens that users write out in messages are plain text"
    )
    group.add_argument(
        "--enable-cache-reset", action="store_true", help="serve POST /reset_prefix_cache, to measure cold caches"
    )
    _add_safety(parser.add_argument_group("who may ask, and how much"))
    group = parser.add_argument_group("log and traces")
    levels = ("debug", "info", "warning", "error")
    group.add_argument("--log-level", choices=levels, default="info", help="least that is told (%(default)s)")
    group.add_argument("--uvicorn-log-level", choices=levels, help="the HTTP library's: warning by default")
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="json: an object on each line (%(default)s)"
    )
    group.add_argument("--enable-log-requests", action="store_true", help="a line for each request, not only failures")
    group.add_argument(
        "--otlp-traces-endpoint", metavar="URL", help="send a span for each request there; needs bulletserve[otel]"
    )


def _add_safety(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"may be repeated; others on this machine can see it: better a file, or {API_KEY_VARIABLE}",
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="a key on each line")
    group.add_argument(
        "--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help="web pages whose scripts may ask; * for any"
    )
    group.add_argument(
        "--max-waiting",
        type=any_whole,
        default=_DEFAULTS.max_waiting,
        metavar="N",
        help="requests that may wait (%(default)s; 429 beyond)",
    )
    group.add_argument(
        "--body-limit-mib",
        type=number,
        default=_DEFAULTS.body_limit_bytes / 2**20,
        metavar="MIB",
        help="largest body (%(default)g; 413 beyond)",
    )
    for flag, default, what in (
        ("--body-timeout", _DEFAULTS.body_timeout_s, "for a whole body (408 then)"),
        ("--header-timeout", _DEFAULTS.header_timeout_s, "for a whole header"),
        ("--write-timeout", _DEFAULTS.write_timeout_s, "in which a client reads nothing of its answer"),
        ("--health-timeout", _DEFAULTS.status_limit_s, "in which the engine is silent or stands still (503 then)"),
        ("--step-timeout", _DEFAULTS.step_limit_s, "for one step of the engine (/health is 503 then)"),
        ("--shutdown-timeout", _DEFAULTS.grace_s, "for open requests after SIGTERM"),
    ):
        group.add_argument(flag, type=number, default=default, metavar="SECONDS", help=f"{what}; {default:g}")


def server_settings(options: argparse.Namespace, model_name: str, slo: Slo) -> ServerSettings:
    """The settings that the flags ask for. Raises `ConfigError`."""
    return ServerSettings(
        served_names=tuple(options.served_model_name or [model_name]),
        host=options.host,
        port=options.port,
        api_keys=_api_keys(options),
        max_waiting=options.max_waiting,
        body_limit_bytes=int(options.body_limit_mib * 2**20),
        body_timeout_s=options.body_timeout,
        header_timeout_s=options.header_timeout,
        write_timeout_s=options.write_timeout,
        status_limit_s=options.health_timeout,
        step_limit_s=options.step_timeout,
        grace_s=options.shutdown_timeout,
        slo=slo,
        slo_classes=tuple(options.slo_class),
        root_path=options.root_path,
        allowed_origins=_origins(options.allowed_origins),
        request_templates=options.trust_request_chat_template,
        cache_reset=options.enable_cache_reset,
        tool_call_parser=_tool_call_parser(options),
    )


def _tool_call_parser(options: argparse.Namespace) -> str | None:
    """The format of calls, if the model may make them. As in vLLM, it takes both flags."""
    if options.enable_auto_tool_choice != (options.tool_call_parser is not None):
        raise ConfigError("--enable-auto-tool-choice and --tool-call-parser need each other")
    parser: str | None = options.tool_call_parser
    return parser


def _api_keys(options: argparse.Namespace) -> tuple[str, ...]:
    keys = list(options.api_key)
    if API_KEY_VARIABLE in os.environ:
        keys.append(os.environ[API_KEY_VARIABLE])
    if options.api_key_file is not None:
        lines = [line.strip() for line in read_text(options.api_key_file, "--api-key-file").splitlines()]
        given = [line for line in lines if line]
        if not given:
            raise ConfigError(f"--api-key-file {options.api_key_file}: there is no key in it")
        keys += given
    return tuple(keys)


def _origins(words: Sequence[str]) -> tuple[str, ...]:
    """Origins as words, or as the JSON list that vLLM takes."""
    if len(words) == 1 and words[0].startswith("["):
        try:
            words = json.loads(words[0])
        except ValueError:
            raise ConfigError(f"--allowed-origins {words[0]}: no JSON list of origins") from None
    for origin in words:
        if origin != "*" and not str(origin).startswith(("http://", "https://")):
            raise ConfigError(f"--allowed-origins {origin}: an origin reads https://example.org, without a path")
    return tuple(words)


def read_text(path: Path, flag: str) -> str:
    """The text of a file that `flag` names. Raises `ConfigError`."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {getattr(error, 'strerror', None) or error}") from None
