"""The options of `bullet bench`: what they are, what they may be, the key and the targets that they name.

Knows nothing about what is done with them.
"""

import argparse
import os
from math import isfinite
from pathlib import Path
from typing import Any

from bulletserve.client.prompts import HIGH_ID, LOW_ID
from bulletserve.commands.numbers import number, rates_or_inf, requests, seed
from bulletserve.commands.outputs import check_outputs
from bulletserve.commands.targets import add_target_arguments, named_targets
from bulletserve.core.errors import ConfigError
from bulletserve.core.json_text import parse_json
from bulletserve.core.slo import Slo
from bulletserve.telemetry.client_lag import BOUND_S
from bulletserve.workload.named import BUILT_IN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The server, what it is asked, how fast, and where results go."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (%(default)s)")
    parser.add_argument("--model", help="as the server calls it; the first that it lists by default")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help="(%(default)s)")
    parser.add_argument("--api-key-env", metavar="NAME", help="the environment variable that holds the API key")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="the file that holds the API key")
    parser.add_argument("--timeout-s", type=number, default=600.0, help="longest time of one answer (%(default)g)")
    parser.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="more fields of every request")
    group = parser.add_argument_group("requests (made-up lengths by default)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--workload", help=f"a .jsonl list, a .csv trace to draw from, or one of {', '.join(BUILT_IN)}")
    source.add_argument("--trace", type=Path, metavar="FILE", help="an Azure or Mooncake trace, replayed as recorded")
    source.add_argument("--sharegpt", type=Path, metavar="FILE", help="a JSON list of conversations")
    lengths = "tokens: 512, 100-900 or lognormal:MEDIAN:SIGMA"
    group.add_argument("--prompt-tokens", metavar="RULE", help=f"{lengths} (lognormal:800:0.8)")
    group.add_argument("--output-tokens", metavar="RULE", help=f"{lengths} (lognormal:120:0.8)")
    group.add_argument("--requests", type=requests, metavar="N", help="the first N; of made-up ones and texts 200")
    group.add_argument("--prompts", choices=("ids", "text"), default="ids", help="token ids or words (%(default)s)")
    group.add_argument(
        "--token-ids",
        type=_id_range,
        default=(LOW_ID, HIGH_ID),
        metavar="LOW-HIGH",
        help=f"drawn for prompts ({LOW_ID}-{HIGH_ID})",
    )
    group.add_argument(
        "--same-prompts", action="store_true", help="the same tokens in every run, so that a prefix cache knows them"
    )
    group.add_argument("--tokenizer", metavar="MODEL", help="counts the tokens of texts; estimated without")
    group.add_argument(
        "--seed", type=seed, default=0, help="of lengths and gaps; a prompt's tokens are new in every run (%(default)s)"
    )
    group = parser.add_argument_group("arrivals")
    group.add_argument(
        "--rate",
        type=rates_or_inf,
        metavar="R[,R...]",
        help="requests a second; inf: all at once; a trace's own by default",
    )
    group.add_argument(
        "--arrivals", metavar="KIND", help="recorded (of lists and traces), poisson (of others), even, gamma:CV"
    )
    group = add_target_arguments(parser)
    group.add_argument("--send-slo", action="store_true", help="tell the targets to the server, in the field slo")
    group = parser.add_argument_group("results")
    group.add_argument("--label", default="", help="what is measured, in words for tables, figures and the summary")
    group.add_argument("--jsonl", type=Path, metavar="FILE", help="write each request there as it ends")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the summary there")
    group.add_argument("--report", type=Path, metavar="FOLDER", help="draw into it, as SVG and PNG")
    group.add_argument(
        "--max-lag-ms", type=number, default=BOUND_S * 1e3, help="most that this client may lag at p99 (%(default)g)"
    )


def check(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for what could only fail after minutes."""
    if options.timeout_s <= 0 or options.max_lag_ms <= 0:
        raise ConfigError("--timeout-s and --max-lag-ms must be above 0")
    if options.api_key_env and options.api_key_file:
        raise ConfigError("--api-key-env and --api-key-file: name one of them")
    if options.endpoint == "chat" and options.token_ids != (LOW_ID, HIGH_ID):
        raise ConfigError("--token-ids: the chat endpoint takes texts only")
    check_outputs({"--json": options.json, "--jsonl": options.jsonl}, options.report)


def api_key(options: argparse.Namespace) -> str | None:
    """The key, which is in no command line: those are seen by others and written into results."""
    key: str | None = None
    if options.api_key_env:
        key = os.environ.get(options.api_key_env, "").strip()
        if not key:
            raise ConfigError(f"--api-key-env: the variable {options.api_key_env} is not set")
    elif options.api_key_file:
        try:
            key = options.api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {options.api_key_file}: {error}") from None
        if not key:
            raise ConfigError(f"--api-key-file {options.api_key_file} is empty")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key has characters that no HTTP header may have")
    return key


def targets(options: argparse.Namespace) -> Slo:
    found = named_targets(options, Path(options.workload).stem if options.workload else "")
    if found is None and options.send_slo:
        raise ConfigError("--send-slo: there are no targets to send; name a --tier or targets")
    return found or Slo("none")


def slo_field(slo: Slo) -> dict[str, float]:
    named = (("ttft_ms", slo.ttft_s), ("tpot_ms", slo.tpot_s))
    return {name: round(seconds * 1e3, 6) for name, seconds in named if seconds is not None}


def _id_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of token ids such as 1000-32000")
    return int(low), int(high)


def _object(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(found, dict) or any(isinstance(v, float) and not isfinite(v) for v in found.values()):
        raise argparse.ArgumentTypeError("a JSON object is wanted, such as '{\"top_p\": 0.9}'")
    return found
