"""Goodput of every policy on simulated hardware: four workloads, three tiers, any number of seeds.

    python benchmarks/goodput_simulated.py --calibration FILE --workloads FOLDER [--policy SPEC ...] [--seeds 1]

Definitions: `bulletserve/telemetry/goodput`. Every curve (workload, tier, policy, seed) is kept in `--runs`, a file of
JSON lines, so that an interrupted or extended table goes on where it was; a curve is run again when the code that made
it has changed. The request lists are not in the repository: `request_lists.py` makes them. The document goes to
benchmarks/new/<name>.json, the table to standard output.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from bulletserve.code_digest import SIMULATOR, code_digest
from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo
from bulletserve.estimator.calibration import Calibration, load
from bulletserve.estimator.estimator import Estimator
from bulletserve.scheduler.policies import make_policy
from bulletserve.simulation import calibration_file
from bulletserve.simulator.engine import limits_of
from bulletserve.simulator.experiment import Setup, ignores_targets, scored_answers
from bulletserve.simulator.goodput_search import place_of, rate_at, search
from bulletserve.telemetry.goodput import Curve, Met, met, tiers_of
from bulletserve.telemetry.latency import Answer
from bulletserve.workload.request_list import read_request_list
from goodput_report import BEST, CHUNKED, Cell, Options, report
from record import record

HERE = Path(__file__).parent
WORKLOADS = ("azure-code", "azure-conv", "arxiv-sum", "long-context")
OTHERS = ("time_sliced", "static_split", "bullet")
WITHOUT_POWER = "without power"
"""After a policy: its forecasts know of no power cap, the device has it all the same."""


@dataclass(frozen=True)
class Job:
    """All tiers of one workload, policy and seed."""

    calibration: str
    workload: str
    policy: str
    seed: int
    share: float
    power: bool = True

    @property
    def fingerprint(self) -> str:
        """Of the code that decides a run, and of the files it reads."""
        return code_digest(SIMULATOR, self.policy, self.calibration, self.workload)

    def key(self, tier: str) -> str:
        """Names a curve, with the code and the files that it depends on."""
        return json.dumps([*vars(self).values(), tier, self.fingerprint])

    @property
    def arm(self) -> str:
        """What it is called in the table."""
        return self.policy if self.power else f"{self.policy} {WITHOUT_POWER}"


Curves = dict[str, Curve]
"""By `Job.key`."""


def curves_of(job: Job) -> list[tuple[str, Curve]]:
    """Search the goodput of every tier; a run of a policy that ignores targets counts for all tiers."""
    calibration = load(Path(job.calibration))
    assert calibration.provenance.shape is not None
    estimator = Estimator(calibration, calibration.provenance.shape)
    planner = None if job.power else Estimator(_without_power(calibration), calibration.provenance.shape)
    setup = Setup(estimator, limits_of(estimator), job.share, planner)
    requests = read_request_list(Path(job.workload))
    truth = setup.truth(job.seed)
    blind = ignores_targets(make_policy(job.policy))
    known: dict[tuple[str, int], list[Answer]] = {}
    found: list[tuple[str, Curve]] = []
    first = place_of(setup.first_rate(requests))
    for tier in tiers_of(Path(job.workload).stem):
        slo = Slo("everybody") if blind else tier

        def run(place: int, slo: Slo = slo, tier: Slo = tier) -> Met:
            at = slo.name, place
            if at not in known:
                known[at] = scored_answers(setup, job.policy, requests, rate_at(place), job.seed, slo, truth)
            return met(known[at], tier)

        curve = search(run, first)
        found.append((job.key(tier.name), curve))
    return found


def _without_power(calibration: Calibration) -> Calibration:
    """The same device, as one sees it who knows nothing of its power cap."""
    return replace(calibration, parameters=replace(calibration.parameters, power_cap_w=inf))


def all_curves(jobs: Sequence[Job], path: Path, processes: int) -> Curves:
    """What `path` holds, completed by what is missing."""
    have = dict(_read(path))
    missing = [job for job in jobs if any(job.key(tier.name) not in have for tier in tiers_of(Path(job.workload).stem))]
    with get_context("spawn").Pool(processes) as pool, path.open("a") as file:
        for number, found in enumerate(pool.imap_unordered(curves_of, missing), 1):
            for key, curve in found:
                have[key] = curve
                packed = {rate: np.packbits(flags).tobytes().hex() for rate, flags in curve.items()}
                file.write(json.dumps({"key": key, "count": len(next(iter(curve.values()))), "curve": packed}) + "\n")
            file.flush()
            print(f"{number} of {len(missing)}", end="\r", file=sys.stderr, flush=True)
    return have


def _read(path: Path) -> Iterator[tuple[str, Curve]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        yield (
            row["key"],
            {
                float(rate): np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=row["count"]).astype(
                    bool
                )
                for rate, text in row["curve"].items()
            },
        )


def by_cell(jobs: Sequence[Job], curves: Curves) -> dict[Cell, dict[str, list[Curve]]]:
    """The curves of each cell and arm, seeds in order; cells and arms in the order of the jobs."""
    found: dict[Cell, dict[str, list[Curve]]] = {}
    for workload in dict.fromkeys(job.workload for job in jobs):
        mine = sorted((job for job in jobs if job.workload == workload), key=lambda job: job.seed)
        name = Path(workload).stem
        for tier in tiers_of(name):
            arms = found.setdefault((name, tier.name), {})
            for job in mine:
                arms.setdefault(job.arm, []).append(curves[job.key(tier.name)])
    return found


def lists_in(folder: Path, workloads: Iterable[str]) -> list[str]:
    """The request list of each workload. Raises `ConfigError`."""
    paths = [folder / f"{workload}.jsonl" for workload in workloads]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ConfigError(
            f"--workloads: {folder} has no {', '.join(missing)}. The lists are not in the repository; make them from "
            f"the published traces: python benchmarks/request_lists.py --traces FOLDER --out {folder} (its --help says "
            "where the traces are)"
        )
    return [str(path) for path in paths]


def main() -> None:
    """Complete the runs, print the table, record the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", default="nvidia-h200", help="a file, or part of a shipped one's name")
    parser.add_argument("--workloads", type=Path, default=HERE.parent.parent / "shared" / "workloads")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument(
        "--policy",
        action="append",
        help=f"may be repeated, and end in ' {WITHOUT_POWER}'; budgets are added by default",
    )
    parser.add_argument("--base", default=BEST, help="the arm that ratios are to")
    parser.add_argument("--ours", default="bullet", help="the arm to compare with the best other one")
    parser.add_argument("--best-by-cell", action="store_true", help="choose the budget per cell, not per workload")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 to N - 1, of arrivals and of the device")
    parser.add_argument("--perturb", type=float, default=0.1, help="share by which the truth may differ, each constant")
    parser.add_argument("--runs", type=Path, default=Path("goodput_runs.jsonl"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--name", default="goodput_simulated", help="of the JSON document")
    options = parser.parse_args()
    try:
        calibration = str(calibration_file(options.calibration))
        workloads = lists_in(options.workloads, options.only)
    except ConfigError as error:
        parser.error(str(error))
    arms = list(dict.fromkeys(options.policy or OTHERS))
    if options.base == BEST:
        arms = [*CHUNKED, *(arm for arm in arms if arm not in CHUNKED)]
    jobs = [
        Job(
            calibration,
            workload,
            arm.removesuffix(WITHOUT_POWER).strip(),
            seed,
            options.perturb,
            not arm.endswith(WITHOUT_POWER),
        )
        for seed, workload, arm in product(range(options.seeds), workloads, arms)
    ]
    curves = all_curves(jobs, options.runs, options.jobs)
    print(f"truth within {options.perturb:.0%} of each constant, seeds 0 to {options.seeds - 1}; goodput in req/s, "
          f"95 % intervals; ratios to {options.base}")  # fmt: skip
    metrics = report(by_cell(jobs, curves), Options(options.base, options.ours, options.best_by_cell))
    print("wrote", record(options.name, metrics))


if __name__ == "__main__":
    main()
