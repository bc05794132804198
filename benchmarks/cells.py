"""The measured cells of docs/benchmarks.md, one after the other on one engine, which starts once.

    python benchmarks/cells.py [CELL ...] [--neighbours] [--runs FOLDER] [--time-limit SECONDS] [-- MODEL OPTIONS]
    python benchmarks/cells.py --list        # the command of each, to run it alone

Each cell is a `bullet compare` command, run as if it stood alone: its tables on standard output, its document in
benchmarks/new/compare_CELL.json, its runs in `--runs`, where the next call goes on. Exit status 3: the time was over,
the same command goes on; 1: a cell failed, the others were measured.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bulletserve.commands import compare
from bulletserve.compose import Engine, build_engine
from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import BulletError
from record import NEW

HERE = Path(__file__).parent
SHAPE = HERE / "shapes" / "llama-3.1-8b" / "config.json"
ENGINE = (str(SHAPE), "--load-format", "dummy", "--dtype", "bfloat16")
CHUNKED = "chunked_prefill:budget"
OURS = "ordering=slack,admission=triage"


@dataclass(frozen=True)
class Cell:
    """A workload and its targets; where the goodput of each arm is looked for, requests a second. `neighbours`: arms at
    another budget than the best one. `rate`: all arms run at this one rate instead."""

    workload: str
    targets: str
    requests: int
    arms: Mapping[str, float]
    neighbours: Mapping[str, float] = field(default_factory=dict)
    rate: float | None = None

    def words(self, lists: Path, neighbours: bool) -> list[str]:
        """What follows `bullet compare MODEL`."""
        arms = {**self.arms, **(self.neighbours if neighbours else {})}
        rates = ["--around", ",".join(f"{near:g}" for near in arms.values())]
        if self.rate is not None:
            rates = ["--rates", f"{self.rate:g}"]
        found = ["--workload", str(lists / f"{self.workload}.jsonl"), "--requests", str(self.requests)]
        return [*found, *self.targets.split(), *rates, "--policies", *arms]


def chunked(budget: int, near: float, near_ours: float) -> dict[str, float]:
    """`chunked_prefill` in arrival order and with `bullet`'s own ordering and admission."""
    return {f"{CHUNKED}={budget}": near, f"{CHUNKED}={budget},{OURS}": near_ours}


def at(*policies: str) -> dict[str, float]:
    """Arms of a cell whose rate is given."""
    return dict.fromkeys(policies, 0.0)


MIDDLE, TIGHT = "--tier middle", "--tier tight"
CELLS = {
    "azure-conv-tight": Cell(
        "azure-conv", TIGHT, 600, {**chunked(256, 11.2, 11.8), "bullet": 13.3}, chunked(512, 10.0, 10.0)
    ),
    "azure-conv-middle": Cell(
        "azure-conv", MIDDLE, 600, {**chunked(512, 16.3, 16.6), "bullet": 19.0}, chunked(256, 15.0, 16.8)
    ),
    "azure-code-middle": Cell(
        "azure-code", MIDDLE, 600, {**chunked(256, 7.1, 10.9), "bullet": 14.4}, chunked(512, 6.8, 9.5)
    ),
    "arxiv-sum-middle": Cell(
        "arxiv-sum", MIDDLE, 600, {**chunked(512, 6.0, 6.1), "bullet": 6.8}, chunked(1024, 5.8, 5.9)
    ),
    "long-context-middle": Cell(
        "long-context", MIDDLE, 240, {**chunked(512, 1.88, 1.96), "bullet": 2.07}, chunked(256, 1.75, 1.85)
    ),
    "long-context-tight": Cell(
        "long-context", TIGHT, 240, {**chunked(256, 1.47, 1.56), "bullet": 1.65}, chunked(512, 1.4, 1.5)
    ),
    "azure-conv-tails-20": Cell("azure-conv", "--ttft-slo-ms 200 --tpot-slo-ms 15", 600, at("bullet"), rate=20),
    "azure-conv-tails-12": Cell(
        "azure-conv",
        TIGHT,
        600,
        at("bullet", *(f"{CHUNKED}={budget}" for budget in (112, 128, 144, 176))),
        rate=12,
    ),
}


def main(words: Sequence[str] | None = None) -> int:
    """Measure the named cells."""
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"all by default: {', '.join(CELLS)}")
    parser.add_argument("--neighbours", action="store_true", help="another budget of chunked_prefill, too")
    parser.add_argument("--lists", type=Path, default=HERE.parent.parent / "shared" / "workloads", metavar="FOLDER")
    parser.add_argument("--runs", type=Path, default=HERE / "results" / "compare", metavar="FOLDER")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin no run that would end later")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    given = [*(sys.argv[1:] if words is None else words)]
    end = given.index("--") if "--" in given else len(given)
    options, engine_words = parser.parse_args(given[:end]), given[end + 1 :] or ENGINE
    if unknown := set(options.cells) - set(CELLS):
        parser.error(f"there is no cell {', '.join(sorted(unknown))}; there are {', '.join(CELLS)}")
    commands = {
        name: [*engine_words, *CELLS[name].words(options.lists, options.neighbours)] for name in options.cells or CELLS
    }
    if options.list:
        for command in commands.values():
            print(shlex.join(["bullet", "compare", *command]))
        return 0
    limit = [] if options.time_limit is None else ["--time-limit", str(options.time_limit)]
    return measure({name: [*command, *limit] for name, command in commands.items()}, options.runs, began_s)


def measure(commands: Mapping[str, Sequence[str]], runs: Path, began_s: float) -> int:
    """Run each as `bullet compare` would, on one engine, as if all had begun at `began_s`; one exit status for all."""
    parser = argparse.ArgumentParser(prog="bullet compare")
    compare.add_arguments(parser)
    NEW.mkdir(exist_ok=True)
    statuses = []
    with OneEngine() as engine:
        for name, command in commands.items():
            more = ["--runs", str(runs), "--json", str(NEW / f"compare_{name.replace('-', '_')}.json")]
            print(f"== {name}", flush=True)
            try:
                statuses.append(compare.compare_on(engine.get, parser.parse_args([*command, *more]), began_s))
            except BulletError as error:
                print(f"{name}: {error}", flush=True)
                statuses.append(1)
    return 1 if 1 in statuses else max(statuses, default=0)


class OneEngine:
    """Builds an engine when one is first asked for, and gives the same to whoever asks next."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def get(self, config: EngineConfig) -> Engine:
        """All cells ask for the same but for the policy and the targets, which `compare` names for each run."""
        self._engine = self._engine or build_engine(config)
        return self._engine

    def __enter__(self) -> "OneEngine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.close()


if __name__ == "__main__":
    sys.exit(main())
