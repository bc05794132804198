"""Whole runs on the measured device: every policy serves everything, the same way every time."""

import pytest

from bulletserve.core.errors import EngineError
from bulletserve.core.plan import Plan
from bulletserve.core.request import FinishReason, Request
from bulletserve.core.slo import Slo
from bulletserve.core.snapshot import Snapshot
from bulletserve.scheduler.policies import POLICIES, make_policy
from bulletserve.scheduler.policy import Forecaster
from bulletserve.scheduler.queue_rules import QueueRules
from bulletserve.simulator.device import counting_token
from bulletserve.simulator.run import drain, h200_limits, prepare, simulate, submit
from bulletserve.simulator.truth import H200Table
from bulletserve.telemetry.latency import summarise
from bulletserve.workload.request_list import at_rate, lognormal_requests

REQUESTS = at_rate(lognormal_requests(40, seed=3), 6.0)


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_gets_its_length(name: str) -> None:
    simulation = simulate(REQUESTS, h200_limits(), make_policy(name), H200Table(), Slo("chat", 0.3, 0.02))
    answers = simulation.collector.answers
    assert simulation.collector.open == 0
    for number, request in enumerate(REQUESTS):
        tokens = answers[number].tokens
        assert answers[number].finish == FinishReason.LENGTH
        first = request.prompt_tokens
        assert tokens == [counting_token(number, first + i) for i in range(request.output_tokens)]
    again = simulate(REQUESTS, h200_limits(), make_policy(name), H200Table(), Slo("chat", 0.3, 0.02))
    assert again.collector.answers == answers


def test_side_by_side_streams_pause_less_than_in_time_slices() -> None:
    """The paper's first figure in one line: prompts do not stop the running streams."""
    runs = {
        name: summarise(
            list(simulate(REQUESTS, h200_limits(), make_policy(name), H200Table()).collector.answers.values())
        )
        for name in POLICIES
    }
    assert runs["static_split"].longest_gap_s < runs["chunked_prefill"].longest_gap_s / 2
    assert runs["chunked_prefill"].longest_gap_s < runs["time_sliced"].longest_gap_s


class Idle:
    """A policy that never starts anything."""

    name = "idle"
    needs_forecasts = False
    rules = QueueRules()

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        return Plan()


def test_a_policy_that_starts_nothing_is_an_error_not_a_hang() -> None:
    simulation = prepare(h200_limits(), Idle(), H200Table())
    submit(simulation, [Request(0, range(10), 5, 0.0)])
    with pytest.raises(EngineError, match="the policy starts nothing"):
        drain(simulation)
