"""An engine on a made-up card, for whole simulated runs."""

from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.calibration import datasheet
from bulletserve.estimator.estimator import Estimator
from bulletserve.simulator.engine import limits_of
from bulletserve.simulator.experiment import Setup

LLAMA_8B = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072)


def h200(share: float = 0.1) -> Setup:
    """An H200 by its datasheet under Llama-3.1-8B; the truth differs by up to `share`."""
    calibration = datasheet("NVIDIA H200", 132)
    assert calibration is not None
    estimator = Estimator(calibration, LLAMA_8B)
    return Setup(estimator, limits_of(estimator), share)
