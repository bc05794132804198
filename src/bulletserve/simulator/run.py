"""Run a request list through the real scheduler on a device made of arithmetic.

Knows nothing about the device's physics (a `Truth` does). Everything that decides is the code that serves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bulletserve.core.errors import EngineError
from bulletserve.core.events import Arrived
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.request import Request
from bulletserve.core.slo import Slo
from bulletserve.core.snapshot import Limits
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.loop import Loop, Observer
from bulletserve.scheduler.policy import Forecaster, Policy
from bulletserve.scheduler.state import State
from bulletserve.simulator.device import SimulatedDevice
from bulletserve.simulator.executor import VirtualExecutor
from bulletserve.simulator.truth import Truth
from bulletserve.telemetry.collector import Collector
from bulletserve.workload.request_list import RequestLengths

H200_LATTICE = Lattice.of_splits(132, tuple(Partition(132 - n, n) for n in (16, 32, 48, 64, 84, 100)))


def h200_limits(total_blocks: int = 40000, max_seqs: int = 256) -> Limits:
    """An H200 with Llama-3.1-8B shapes: 32 layers, prefill layer groups of about 8 ms."""
    return Limits(32, 16, total_blocks, max_seqs, 11000, 2048, H200_LATTICE)


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
    state = State(limits, ledger, policy.rules, estimator)
    executor = VirtualExecutor(device or SimulatedDevice(truth, limits.num_layers), limits.lattice)
    collector = Collector()
    return Simulation(
        collector,
        state,
        Loop(state, policy, executor, executor, executor, collector, observer),
        executor,
    )


def submit(simulation: Simulation, requests: Sequence[Request]) -> None:
    """Let requests arrive at their times."""
    for request in requests:
        simulation.collector.expect(request)
        simulation.executor.schedule(request.arrival_s, Arrived(request))


def drain(simulation: Simulation) -> None:
    """Turn until nothing is left. Raises `EngineError` when requests are left and nothing will ever happen."""
    while simulation.executor.has_work or not simulation.state.is_idle:
        if not (simulation.executor.has_work or simulation.loop.unsettled):
            raise EngineError("requests are left, but the policy starts nothing")
        simulation.loop.turn()
        if simulation.state.fault:
            raise EngineError(simulation.state.fault)


def simulate(
    requests: Sequence[RequestLengths],
    limits: Limits,
    policy: Policy,
    truth: Truth,
    slo: Slo | None = None,
    estimator: Forecaster | None = None,
) -> Simulation:
    """Serve a list of lengths with made-up tokens; outputs are forced to their length."""
    simulation = prepare(limits, policy, truth, estimator=estimator)
    submit(
        simulation,
        [
            Request(i, range(r.prompt_tokens), r.output_tokens, r.arrival_s, slo=slo or Slo())
            for i, r in enumerate(requests)
        ],
    )
    drain(simulation)
    return simulation
