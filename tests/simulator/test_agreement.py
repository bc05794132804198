"""A record beside its own simulation: nothing differs where the device is the same, and what differs is told."""

from pathlib import Path

import pytest

from bulletserve.agreement import agreement
from bulletserve.core.errors import RecordError
from bulletserve.core.slo import Slo
from bulletserve.scheduler.replay import RecordedEngine
from bulletserve.simulator.experiment import run_arm
from bulletserve.simulator.truth import ModelTruth
from bulletserve.telemetry.recorder import Recorder
from bulletserve.workload.request_list import lognormal_requests
from tests.simulator.devices import h200

REQUESTS = lognormal_requests(25, seed=3)


def recorded(path: Path, *, prefill: float = 1.0, decode: float = 1.0, forecasts: bool = True) -> Path:
    setup = h200(share=0.0)
    policy = "static_split:decode_fraction=0.25"
    estimator = setup.estimator
    engine = RecordedEngine(policy, setup.limits, caching=False, estimator=estimator if forecasts else None)
    recorder = Recorder(path, engine.header(seed=0))
    constants = estimator.calibration.parameters
    truth = ModelTruth(constants, 132, estimator.shape, 2, prefill, decode)
    run_arm(setup, policy, REQUESTS, 8.0, 0, Slo("chat", 0.3, 0.02), truth, observer=recorder)
    recorder.close()
    return path


def test_the_same_device_agrees_exactly(tmp_path: Path) -> None:
    found = agreement(recorded(tmp_path / "run"))
    assert found.requests == 25
    assert found.errors() == pytest.approx(
        dict.fromkeys(("ttft_mean", "ttft_p90", "tpot_mean", "tpot_p90"), 0.0), abs=1e-6
    )


def test_a_slower_device_is_told(tmp_path: Path) -> None:
    errors = agreement(recorded(tmp_path / "run", decode=1.25)).errors()
    assert errors["tpot_mean"] == pytest.approx(1 / 1.25 - 1, abs=0.05)
    errors = agreement(recorded(tmp_path / "again", prefill=0.8)).errors()
    assert errors["ttft_mean"] > 0.15


def test_a_record_without_forecasts_cannot_be_simulated(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="without a calibration"):
        agreement(recorded(tmp_path / "run", forecasts=False))
