"""All GPU benchmarks in one process, so that the engine starts once.

    python -m benchmarks.gpu.all [--only phases,corun] [--out DIR] [--limit-s 570] [options of the scripts]

Each script stands alone: what fails in one is printed, and the next one runs. `--limit-s`: how long the process may
take; a script that has not begun by then is left out, and `offline` begins no run that would not end in time.
"""

import logging
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Report
from benchmarks.record import NEW

SCRIPTS = ("phases", "corun", "decode_gaps", "host_cost", "operators", "partition_switch", "idle_tax", "offline")
WITHOUT_ENGINE = ("partition_switch",)


def main(only: str | None = None) -> None:
    """Run the scripts that the command line names, or the one called `only`; exit status 1 if one failed."""
    began_s = time.monotonic()
    modules = {name: import_module(f"benchmarks.gpu.{name}") for name in ((only,) if only else SCRIPTS)}
    options = _options(modules, only)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    names = [name for name in modules if name in options.only.split(",")]
    until_s = began_s + options.limit_s
    failed = _run(names, modules, options, until_s)
    print(f"{len(names) - len(failed)} of {len(names)} done in {time.monotonic() - began_s:.0f} s", *failed, flush=True)
    sys.exit(bool(failed))


def _options(modules: dict[str, Any], only: str | None) -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=only or ",".join(modules), help="scripts, separated by commas")
    parser.add_argument("--out", type=Path, default=NEW, help="folder of the JSON documents (benchmarks/new)")
    parser.add_argument("--limit-s", type=float, default=570.0, help="seconds this process may take")
    for module in modules.values():
        module.add_options(parser)
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(modules)
    if unknown:
        parser.error(f"no script is called {', '.join(sorted(unknown))}; there are {', '.join(modules)}")
    return options


def _run(names: list[str], modules: dict[str, Any], options: Namespace, until_s: float) -> list[str]:
    """The names of the scripts that failed or had no time."""
    bench = None
    failed: list[str] = []
    for name in names:
        began_s = time.monotonic()
        if began_s > until_s:
            failed.append(f"{name} (no time)")
            continue
        print(f"== {name}", flush=True)
        try:
            if name in WITHOUT_ENGINE:
                modules[name].run(options, Report(f"gpu_{name}", options.out))
            else:
                from benchmarks.gpu.bench import start_bench  # needs Triton

                bench = bench or start_bench(options, options.out, until_s)
                modules[name].run(bench, bench.report(name))
            print(f"   {time.monotonic() - began_s:.0f} s", flush=True)
        except Exception:
            traceback.print_exc(limit=-4)
            failed.append(name)
            if bench is None and name not in WITHOUT_ENGINE:
                print("no engine, so nothing else")
                return [*failed, *names[names.index(name) + 1 :]]
    if bench is not None:
        bench.close()
    return failed


if __name__ == "__main__":
    main()
