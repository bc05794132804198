"""Goodput of every policy on simulated hardware: four workloads, three tiers, any number of seeds.

    python benchmarks/goodput_simulated.py --calibration FILE --workloads FOLDER [--policy SPEC ...] [--seeds 1]

Definitions: `bulletserve/telemetry/goodput`. Every curve (workload, tier, policy, seed) is kept in `--runs`, a file of
JSON lines, so that an interrupted or extended table goes on where it was; a curve is run again when the code that made
it has changed. The document goes to benchmarks/results/<name>.json, the table to standard output.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import product
from multiprocessing import Pool
from pathlib import Path

import numpy as np

import bulletserve
from bulletserve.core.slo import Slo
from bulletserve.estimator.calibration import load
from bulletserve.estimator.estimator import Estimator
from bulletserve.scheduler.policies import POLICIES, make_policy
from bulletserve.simulator.engine import limits_of
from bulletserve.simulator.experiment import Setup, ignores_targets, scored_answers
from bulletserve.simulator.goodput_search import place_of, rate_at, search
from bulletserve.telemetry.goodput import (
    BUDGETS,
    Curve,
    Met,
    estimate,
    geometric_mean,
    met,
    ratio,
    tiers_of,
)
from bulletserve.telemetry.latency import Answer
from bulletserve.workload.request_list import read_request_list
from record import record

HERE = Path(__file__).parent
WORKLOADS = ("azure-code", "azure-conv", "arxiv-sum", "long-context")
CHUNKED = tuple(f"chunked_prefill:budget={budget}" for budget in BUDGETS)
DEFAULT = (*CHUNKED, "time_sliced", "static_split")
BEST = "chunked_prefill (best budget)"


@dataclass(frozen=True)
class Job:
    """All tiers of one workload, policy and seed."""

    calibration: str
    workload: str
    policy: str
    seed: int
    share: float

    def key(self, tier: str) -> str:
        """Names a curve, with the code and the files that it depends on."""
        return json.dumps([*vars(self).values(), tier, _fingerprint(self.policy, self.calibration, self.workload)])


Curves = dict[str, Curve]
"""By `Job.key`."""


def curves_of(job: Job) -> list[tuple[str, Curve]]:
    """Search the goodput of every tier; a run of a policy that ignores targets counts for all tiers."""
    calibration = load(Path(job.calibration))
    assert calibration.provenance.shape is not None
    estimator = Estimator(calibration, calibration.provenance.shape)
    setup = Setup(estimator, limits_of(estimator), job.share)
    requests = read_request_list(Path(job.workload))
    truth = setup.truth(job.seed)
    blind = ignores_targets(make_policy(job.policy))
    known: dict[tuple[str, int], list[Answer]] = {}
    found = []
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


def all_curves(jobs: Sequence[Job], path: Path, processes: int) -> Curves:
    """What `path` holds, completed by what is missing."""
    have = dict(_read(path))
    missing = [job for job in jobs if any(job.key(tier.name) not in have for tier in tiers_of(Path(job.workload).stem))]
    with Pool(processes) as pool, path.open("a") as file:
        for number, found in enumerate(pool.imap_unordered(curves_of, missing), 1):
            for key, curve in found:
                have[key] = curve
                packed = {rate: np.packbits(flags).tobytes().hex() for rate, flags in curve.items()}
                file.write(json.dumps({"key": key, "count": len(next(iter(curve.values()))), "curve": packed}) + "\n")
            file.flush()
            print(f"{number} of {len(missing)}", end="\r", flush=True)
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


@cache
def _fingerprint(policy: str, *files: str) -> str:
    """Of the code that decides a run (other policies' files aside), and of the files it reads."""
    root = Path(bulletserve.__file__).parent
    own = POLICIES[policy.partition(":")[0]].partition(":")[0].rpartition(".")[2] + ".py"
    digest = sha256()
    for folder in ("core", "estimator", "scheduler", "simulator"):
        for path in sorted((root / folder).rglob("*.py")):
            if path.parent.name != "policies" or path.name in (own, "__init__.py"):
                digest.update(path.read_bytes())
    for name in files:
        digest.update(Path(name).read_bytes())
    return digest.hexdigest()[:12]


def report(arms: Sequence[str], jobs: Sequence[Job], curves: Curves, base: str) -> dict[str, float]:
    """Print the table; every figure of it."""
    cells = {(Path(j.workload).stem, tier.name) for j in jobs for tier in tiers_of(Path(j.workload).stem)}
    metrics: dict[str, float] = {}
    ratios: dict[str, list[float]] = {arm: [] for arm in arms}
    for workload, tier in sorted(
        cells, key=lambda cell: (WORKLOADS.index(cell[0]), ("loose", "middle", "tight").index(cell[1]))
    ):
        of_arm: dict[str, list[Curve]] = {}
        for arm in arms:
            mine = [j for j in jobs if j.policy == arm and Path(j.workload).stem == workload]
            of_arm[arm] = [curves[job.key(tier)] for job in sorted(mine, key=lambda job: job.seed)]
        values = {arm: estimate(found) for arm, found in of_arm.items()}
        budgets = [arm for arm in arms if arm in CHUNKED]
        best = max(budgets, key=lambda arm: values[arm].value) if budgets else base
        reference = best if base == BEST else base
        print(f"\n{workload} {tier}" + (f"   ({best} is the best budget)" if budgets else ""))
        for arm in arms:
            against = ratio(of_arm[arm], of_arm[reference])
            if against is not None:
                ratios[arm].append(against.value)
            key = f"goodput_{workload}_{tier}_{_plain(arm)}".replace("-", "_")
            metrics |= {
                f"{key}_req_s": values[arm].value,
                f"{key}_low_req_s": values[arm].low,
                f"{key}_high_req_s": values[arm].high,
            }
            print(f"  {arm:44} {values[arm].describe():26} {'-' if against is None else against.describe()} x")
    print(f"\ngeometric mean of the ratios to {base}, each capped at 3:")
    for arm in arms:
        mean = geometric_mean(ratios[arm])
        metrics[f"mean_ratio_{_plain(arm)}_x"] = mean
        print(f"  {arm:44} {mean:.3f} over {len(ratios[arm])} cells")
    return metrics


def _plain(arm: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in arm)


def main() -> None:
    """Complete the runs, print the table, record the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=Path, default=HERE / "h200_llama8b.calibration.json")
    parser.add_argument("--workloads", type=Path, default=HERE.parent.parent / "shared" / "workloads")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument(
        "--policy", action="append", help="may be repeated; all of chunked_prefill's budgets and the others by default"
    )
    parser.add_argument("--base", default=BEST, help="the arm that ratios are to")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 to N - 1, of arrivals and of the device")
    parser.add_argument("--perturb", type=float, default=0.1, help="share by which the truth may differ, each constant")
    parser.add_argument("--runs", type=Path, default=Path("goodput_runs.jsonl"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--name", default="goodput_simulated", help="of the document in benchmarks/results")
    options = parser.parse_args()
    arms = list(dict.fromkeys(options.policy or DEFAULT))
    if options.base == BEST:
        arms = [*(arm for arm in CHUNKED if arm not in arms), *arms]
    jobs = [
        Job(str(options.calibration), str(options.workloads / f"{workload}.jsonl"), arm, seed, options.perturb)
        for seed, workload, arm in product(range(options.seeds), options.only, arms)
    ]
    curves = all_curves(jobs, options.runs, options.jobs)
    print(f"truth within {options.perturb:.0%} of each constant, seeds 0 to {options.seeds - 1}; goodput in req/s, "
          f"95 % intervals; ratios to {options.base}")  # fmt: skip
    print("wrote", record(options.name, report(arms, jobs, curves, options.base)))


if __name__ == "__main__":
    main()
