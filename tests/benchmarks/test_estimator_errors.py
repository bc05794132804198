"""The checks of a calibration on another model and on points left out, on a device whose constants are known."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from bulletserve.core.shapes import ModelShape
from bulletserve.measurements import Measurements
from tests.estimator.devices import CAPPED, LLAMA_8B, QWEN_1_7B, TOTAL, measured

FACTS = {"name": "a device", "total_sms": TOTAL, "power_cap_w": 700.0, "top_clock_mhz": 1980.0, "dtype": "bfloat16"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.delitem(sys.modules, "record", raising=False)
    return importlib.import_module("estimator_errors")


def points(shape: ModelShape, seed: int) -> Measurements:
    samples = measured(CAPPED, shape, 60, seed, noise=0.01)
    return Measurements(FACTS, shape, 2, tuple(samples[:45]), tuple(samples[45:]))


def run(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, float]:
    told: dict[str, float] = {}
    monkeypatch.setattr(script, "record", lambda name, metrics: told.update(metrics) or tmp_path)
    monkeypatch.setattr(sys, "argv", ["estimator_errors.py", *words])
    script.main()
    return told


def test_another_model_on_the_same_device_is_predicted(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, shape, seed in (("llama", LLAMA_8B, 1), ("qwen", QWEN_1_7B, 2)):
        points(shape, seed).save(tmp_path / f"{name}.samples.json")
    files = [str(tmp_path / f"{name}.samples.json") for name in ("llama", "qwen")]
    told = run(script, tmp_path, monkeypatch, "transfer", *files)
    assert 0.0 < told["llama_to_qwen_all_median_x"] < 0.06 and told["qwen_to_llama_all_median_x"] < 0.12
    assert told["qwen_by_its_own_fit_all_median_x"] < 0.03


def test_every_point_is_predicted_by_a_fit_without_it(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points(LLAMA_8B, 1).save(tmp_path / "x.samples.json")
    told = run(script, tmp_path, monkeypatch, "folds", str(tmp_path / "x.samples.json"), "--folds", "3")
    assert told["calibrated_all_median_x"] < 0.04 < told["roofline_side_by_side_median_x"]
