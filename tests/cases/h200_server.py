"""A server over an H200 made of arithmetic, under Llama-3.1-8B: the shipped calibration, on the wall clock."""

from functools import cache
from pathlib import Path

from bulletserve.simulation import open_calibration
from bulletserve.simulator.engine import limits_of
from bulletserve.simulator.experiment import Setup
from tests.simulated_server import SimulatedServer

CONTEXT_TOKENS = 131_072


@cache
def h200() -> Setup:
    """The device differs from what the policies plan with by up to a tenth in every constant."""
    estimator = open_calibration("nvidia-h200")
    limits = limits_of(estimator)
    estimator.prepare(limits.lattice, limits.max_seqs, limits.batch_tokens)
    return Setup(estimator, limits)


def h200_server(policy: str, folder: Path) -> SimulatedServer:
    """A server under a policy, as `--policy` takes it."""
    setup = h200()
    return SimulatedServer(
        policy,
        folder,
        limits=setup.limits,
        truth=setup.truth(3),
        estimator=setup.estimator,
        max_model_len=CONTEXT_TOKENS,
    )
