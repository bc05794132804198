"""How long ten minutes of traffic take to simulate, on one core.

    python benchmarks/simulator_speed.py [--policy SPEC ...] [--rate 20] [--minutes 10]

Requests like azure-conv's (`workload/recipe.synthetic`), served to the last one; truth within 10 % of the calibration,
seed 0. CPU seconds of the process. Wanted for ten minutes at 20 requests a second: 20 s with `chunked_prefill`, 60 s
with `bullet`.
"""

import argparse
import time

from bulletserve.scheduler.policies import POLICIES
from bulletserve.simulation import open_calibration
from bulletserve.simulator.engine import limits_of
from bulletserve.simulator.experiment import Setup, run_arm
from bulletserve.telemetry.goodput import TIERS, met
from bulletserve.telemetry.metric_keys import key_part
from bulletserve.workload.recipe import synthetic
from record import record


def main() -> None:
    """Run, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", default="nvidia-h200")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    estimator = open_calibration(options.calibration)
    setup = Setup(estimator, limits_of(estimator))
    requests = synthetic("azure-conv", count=round(options.rate * options.minutes * 60))
    metrics: dict[str, float] = {}
    for policy in options.policy or ("chunked_prefill:budget=1024", *(p for p in POLICIES if p != "chunked_prefill")):
        began_s = time.process_time()
        run = run_arm(setup, policy, requests, options.rate, 0, TIERS[0])
        took_s = time.process_time() - began_s
        attained = float(met(list(run.collector.answers.values()), TIERS[0]).mean())
        turns, virtual_s = run.loop.turns, run.executor.now_s()
        print(f"{policy:40} {took_s:6.1f} s for {virtual_s:.0f} s, {turns} turns, {attained:.1%} met loose targets")
        name = key_part(policy)
        metrics |= {f"{name}_cpu_s": took_s, f"{name}_virtual_s": virtual_s, f"{name}_turn_us": took_s / turns * 1e6}
    print("wrote", record("simulator_speed", metrics))


if __name__ == "__main__":
    main()
