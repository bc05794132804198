"""One run of one arm: a workload at a rate under a policy, on a device that differs from its calibration by a seed.

Knows nothing about searches or reports. The same seed gives the same arrivals and the same device to every policy, so
that two policies are compared on equal terms; seed 0 has the workload's own arrivals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.slo import Slo
from bulletserve.core.snapshot import Limits
from bulletserve.estimator.estimator import Estimator
from bulletserve.scheduler.loop import Observer
from bulletserve.scheduler.policies import make_policy
from bulletserve.scheduler.policy import Policy
from bulletserve.scheduler.queue_rules import FIRST_COME
from bulletserve.simulator.run import Simulation, simulate
from bulletserve.simulator.truth import ModelTruth, Perturbation, Truth, perturbation
from bulletserve.telemetry.goodput import scored
from bulletserve.telemetry.latency import Answer
from bulletserve.workload.request_list import RequestLengths, at_rate, with_new_gaps

_BLIND = ("time_sliced", "chunked_prefill", "static_split")


@dataclass(frozen=True)
class Setup:
    """What all arms of an experiment share. `share`: how far the truth may be from the calibration, per constant.

    `planner`: the policies' forecasts, if they are others than those that the truth is made from.
    """

    estimator: Estimator
    limits: Limits
    share: float = 0.1
    planner: Estimator | None = None

    def change(self, seed: int) -> Perturbation:
        """How the device of a seed differs from the calibration."""
        return perturbation(self.share, seed)

    def truth(self, seed: int) -> Truth:
        """The device of a seed."""
        known = self.estimator
        return ModelTruth.perturbed(known.calibration, known.shape, self.change(seed), known.dtype_bytes)

    def first_rate(self, requests: Sequence[RequestLengths]) -> float:
        """A rate to begin a search with: half of what the device could prefill if it did nothing else."""
        limits = self.limits
        batch = StepShape.prefill([(limits.batch_tokens, 0)], limits.num_layers, 1)
        batch_s = self.estimator.predict(batch, Partition(limits.lattice.total_sms, 0)).seconds
        return 0.5 * limits.batch_tokens / batch_s * len(requests) / sum(one.prompt_tokens for one in requests)


def arrivals(requests: Sequence[RequestLengths], rate: float, seed: int) -> tuple[RequestLengths, ...]:
    """The workload's requests at a rate, with the arrivals of a seed."""
    return at_rate(with_new_gaps(requests, seed) if seed else requests, rate)


def ignores_targets(policy: Policy) -> bool:
    """Whether a policy serves alike whatever the targets are, so that one run tells of all of them."""
    return policy.name in _BLIND and policy.rules == FIRST_COME


def run_arm(
    setup: Setup,
    policy: str,
    requests: Sequence[RequestLengths],
    rate: float,
    seed: int,
    slo: Slo | None = None,
    truth: Truth | None = None,
    *,
    last: int | None = None,
    observer: Observer | None = None,
    forecasts: bool = True,
) -> Simulation:
    """Serve the requests at a rate; `last` as in `simulate`. `truth`: the seed's device, if it was made before.

    `forecasts` False: for a policy that does as well without, which is quicker.
    """
    return simulate(
        arrivals(requests, rate, seed),
        setup.limits,
        make_policy(policy),
        truth or setup.truth(seed),
        slo,
        (setup.planner or setup.estimator) if forecasts else None,
        last=last,
        observer=observer,
    )


def scored_answers(
    setup: Setup,
    policy: str,
    requests: Sequence[RequestLengths],
    rate: float,
    seed: int,
    slo: Slo | None = None,
    truth: Truth | None = None,
) -> list[Answer]:
    """The answers that goodput is scored on; the run ends with the last of them."""
    numbers = scored(len(requests))
    forecasts = not ignores_targets(make_policy(policy))
    run = run_arm(setup, policy, requests, rate, seed, slo, truth, last=numbers[-1], forecasts=forecasts)
    answers = run.collector.answers
    return [answers[number] for number in numbers]
