"""A policy of one's own in about thirty lines: one prompt at a time, and decode on half of the device beside it.

    bullet serve --policy polite            once the package below is installed; or see how it does on a simulated card:
    python examples/write_a_policy.py

A package offers it with this in its pyproject.toml:

    [project.entry-points."bulletserve.policies"]
    polite = "write_a_policy:Polite"
"""

from dataclasses import dataclass

from bulletserve.core.plan import Plan
from bulletserve.core.slo import Slo
from bulletserve.core.snapshot import LANE_DEPTH, Snapshot
from bulletserve.scheduler.batching import admissions, decode_or_preempt, next_group
from bulletserve.scheduler.policy import Forecaster
from bulletserve.scheduler.queue_parts import QueueParts


@dataclass(frozen=True)
class Polite(QueueParts):
    """Fields are options: `--policy polite:share=0.3,ordering=slack`."""

    share: float = 0.5
    name = "polite"

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        """Asked again until the plan is empty, so one thing at a time is enough."""
        if not snapshot.admitted and snapshot.prefill is None and (admit := admissions(snapshot, 1)):
            return Plan(admit=admit, because="one at a time")
        split = snapshot.limits.lattice.nearest_split(self.share)
        if snapshot.prefill_lane.queued < LANE_DEPTH and (group := next_group(snapshot, 8192, split.prefill_sms)):
            return Plan(starts=(group,), because="a prompt waits")
        if snapshot.decode_lane.queued == LANE_DEPTH:
            return Plan(because="a step ahead")
        step, victims = decode_or_preempt(snapshot, split.decode_sms)
        return Plan(starts=(step,) if step else (), preempt=victims, because="decode beside it")


if __name__ == "__main__":
    from bulletserve.core.shapes import ModelShape
    from bulletserve.estimator.calibration import datasheet
    from bulletserve.estimator.estimator import Estimator
    from bulletserve.simulator.engine import limits_of
    from bulletserve.simulator.experiment import Setup
    from bulletserve.simulator.run import simulate
    from bulletserve.telemetry.latency import quantile
    from bulletserve.workload.request_list import RequestLengths

    card = datasheet("NVIDIA H200", 132)
    assert card is not None
    estimator = Estimator(card, ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072))
    setup = Setup(estimator, limits_of(estimator))
    slo = Slo("chat", ttft_s=0.5, tpot_s=0.02)
    requests = [RequestLengths(at / 8, 1000 + at % 7 * 100, 50) for at in range(200)]
    run = simulate(requests, setup.limits, Polite(), setup.truth(1), slo, estimator)
    answers = run.collector.answers.values()
    print(f"median TTFT {quantile([a.ttft_s for a in answers], 0.5) * 1e3:.0f} ms")
    print(f"{sum(a.meets(slo) for a in answers)} of {len(answers)} requests met their targets")
