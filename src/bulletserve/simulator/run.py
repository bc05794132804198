"""Run a request list through the real scheduler on a device made of arithmetic.

Knows nothing about the device's physics (a `Truth` does). Everything that decides is the code that serves.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from bulletserve.core.errors import EngineError, PolicyError
from bulletserve.core.events import Arrived
from bulletserve.core.request import Request
from bulletserve.core.slo import Slo
from bulletserve.core.snapshot import Limits
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.loop import Loop, Observer
from bulletserve.scheduler.policy import Forecaster, Policy
from bulletserve.scheduler.state import State
from bulletserve.simulator.device import SimulatedDevice
from bulletserve.simulator.executor import VirtualExecutor
from bulletserve.simulator.guide import AllowingGuide
from bulletserve.simulator.truth import Truth
from bulletserve.telemetry.collector import Collector
from bulletserve.workload.request_list import RequestLengths

HOST_S = 0.4e-3
"""From a decision to the moment at which the device may begin the step: measured at 256 rows (docs/LOG.md)."""


@dataclass
class Simulation:
    """One run; `collector.answers` holds the outcome by request number."""

    collector: Collector
    state: State
    loop: Loop
    executor: VirtualExecutor


def prepare(
    limits: Limits,
    policy: Policy,
    truth: Truth,
    *,
    estimator: Forecaster | None = None,
    caching: bool = False,
    device: SimulatedDevice | None = None,
    observer: Observer | None = None,
) -> Simulation:
    """An idle engine on a virtual clock."""
    ledger = KvLedger(limits.total_blocks + 1, limits.block_size, caching)
    if device is None:
        device = SimulatedDevice(truth, limits.num_layers, token_of=None, host_s=HOST_S)
    executor = VirtualExecutor(device, limits.lattice)
    state = State(limits, ledger, policy.rules, estimator, AllowingGuide(executor))
    collector = Collector()
    loop = Loop(state, policy, executor, executor, executor, collector, observer)
    return Simulation(collector, state, loop, executor)


def submit(simulation: Simulation, requests: Sequence[Request]) -> None:
    """Let requests arrive at their times."""
    for request in requests:
        simulation.collector.expect(request)
        simulation.executor.schedule(request.arrival_s, Arrived(request))


def drain(simulation: Simulation, last: int | None = None) -> None:
    """Turn until nothing is left, or until the requests numbered up to `last` have ended.

    Raises `PolicyError` when requests are left and nothing will ever happen, `EngineError` for a fault.
    """
    answers = simulation.collector.answers
    waited = iter(()) if last is None else iter(range(last + 1))
    number = next(waited, None)
    while simulation.executor.has_work or not simulation.state.is_idle:
        if not (simulation.executor.has_work or simulation.loop.unsettled):
            left, policy = simulation.state.lying, simulation.loop.policy.name
            raise PolicyError(f"{left} requests are left, but the policy {policy} starts nothing")
        simulation.loop.turn()
        if simulation.state.fault:
            raise EngineError(simulation.state.fault)
        if simulation.loop.stalled:
            raise PolicyError(simulation.loop.stalled)
        while number is not None and answers[number].finish:
            number = next(waited, None)
        if last is not None and number is None:
            return


def made_up(requests: Sequence[RequestLengths], slo: Slo | None = None) -> list[Request]:
    """Requests of these lengths, numbered from 0, with tokens that mean nothing and answers forced to their length."""
    slo = slo or Slo()
    return [
        Request(number, array("q", bytes(8 * one.prompt_tokens)), one.output_tokens, one.arrival_s, slo=slo)
        for number, one in enumerate(requests)
    ]


def simulate(
    requests: Sequence[RequestLengths],
    limits: Limits,
    policy: Policy,
    truth: Truth,
    slo: Slo | None = None,
    estimator: Forecaster | None = None,
    *,
    last: int | None = None,
    observer: Observer | None = None,
) -> Simulation:
    """Serve a list of lengths; all of it, or until the requests numbered up to `last` have ended."""
    simulation = prepare(limits, policy, truth, estimator=estimator, observer=observer)
    submit(simulation, made_up(requests, slo))
    drain(simulation, last)
    return simulation
