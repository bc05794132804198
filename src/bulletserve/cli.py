"""The command `bullet`: finds the subcommand, turns our own errors into one line and an exit status.

Knows nothing about what the subcommands do; each is a module of `commands` with `add_arguments` and `run`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from bulletserve.core.errors import BulletError
from bulletserve.version import __version__

COMMANDS = {
    "serve": "serve a model over an OpenAI-compatible HTTP interface",
    "generate": "complete prompts on this machine, without a server",
    "bench": "measure any OpenAI-compatible server under a list of requests",
    "compare": "run the same requests under several policies and print one table",
    "calibrate": "measure this device, so that forecasts of its steps can be trusted",
    "simulate": "run a workload under any policy on a calibrated device made of arithmetic",
    "replay": "decide a recorded run again and show where it comes out otherwise",
    "doctor": "say what this machine offers and what is missing",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `bullet`. The exit status: 0, 1 for a failure of ours, 2 for a mistake in the command line."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except BulletError as error:
        print(f"bullet: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # nobody reads what we print, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a disk that fills up, a file that goes away: what was tried out may still fail later
        print(f"bullet: {error.filename or 'the system'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bullet", description="LLM serving, prefill and decode side by side.")
    parser.add_argument("--version", action="version", version=f"bullet {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name in words[:1]:  # only the chosen subcommand is imported
            import_module(f"bulletserve.commands.{name}").add_arguments(command)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        commands.choices[options.command].error(f"unknown: {' '.join(unknown)}; see bullet {options.command} --help")
    return int(import_module(f"bulletserve.commands.{options.command}").run(options))
