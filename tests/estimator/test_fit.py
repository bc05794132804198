"""The fit: known devices are found again, and real measurements are explained."""

from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median

import pytest

from bulletserve.core.errors import ConfigError
from bulletserve.core.partition import Partition
from bulletserve.core.samples import Sample
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.baselines import linear_regression, roofline
from bulletserve.estimator.errors import by_group, exact
from bulletserve.estimator.estimator import Estimator
from bulletserve.estimator.fit import DeviceFacts, first_guess, fit
from bulletserve.estimator.parameters import BOUNDS, Parameters
from bulletserve.measurements import load_measurements
from tests.estimator.devices import CAPPED, LLAMA_8B, QWEN_1_7B, SMOLLM2, THREAD, TOTAL, UNCAPPED, measured

H200_POINTS = Path(__file__).parent / "data"


def facts(parameters: Parameters, *, power: bool = True) -> DeviceFacts:
    cap = parameters.power_cap_w if power and parameters.power_cap_w < inf else None
    return DeviceFacts("a device of arithmetic", TOTAL, cap, parameters.top_clock_mhz, source="synthetic")


def errors(parameters: Parameters, shape: ModelShape, truth: Parameters, seed: int) -> list[float]:
    """Relative errors on unseen points without noise."""
    unseen = measured(truth, shape, 60, seed, noise=0.0)
    return [abs(exact(parameters, TOTAL, shape, sample).seconds / sample.seconds - 1) for sample in unseen]


@pytest.mark.parametrize("truth", [CAPPED, UNCAPPED], ids=["capped", "uncapped"])
def test_unseen_points_of_a_known_device_are_predicted(truth: Parameters) -> None:
    found = fit(measured(truth, LLAMA_8B, 80, 1, noise=0.02), facts(truth), LLAMA_8B)
    off = sorted(errors(found.calibration.parameters, LLAMA_8B, truth, 2))
    assert median(off) < 0.015
    assert off[int(0.9 * len(off))] < 0.03
    # Another model on the same device, without a sample of it.
    off = errors(found.calibration.parameters, QWEN_1_7B, truth, 3)
    assert median(off) < 0.05
    assert len(found.residuals) == 80
    assert median(abs(r) for r in found.residuals) < 0.03


def test_constants_that_samples_speak_about_are_found() -> None:
    found = fit(measured(CAPPED, LLAMA_8B, 80, 4, noise=0.02), facts(CAPPED), LLAMA_8B).calibration.parameters
    within = {
        "matmul_flops": 0.1,
        "attention_flops": 0.25,
        "attention_bytes": 0.1,
        "device_bytes": 0.1,
        "decode_layer_s": 0.4,
        "static_w": 0.15,
        "flop_j": 0.15,
        "byte_j": 0.15,
        "voltage": 0.3,
    }
    off = {name: getattr(found, name) / getattr(CAPPED, name) - 1 for name in within}
    assert {name: value for name, value in off.items() if abs(value) > within[name]} == {}


def test_one_wrong_sample_in_ten_does_no_harm() -> None:
    samples = measured(CAPPED, LLAMA_8B, 80, 5, noise=0.02)
    spoilt = [replace(s, seconds=s.seconds * 1.6) if i % 10 == 3 else s for i, s in enumerate(samples)]
    found = fit(spoilt, facts(CAPPED), LLAMA_8B).calibration.parameters
    off = sorted(errors(found, LLAMA_8B, CAPPED, 6))
    assert median(off) < 0.02
    assert off[int(0.9 * len(off))] < 0.05


def test_without_counters_there_is_no_power_in_it() -> None:
    truth = replace(UNCAPPED, power_cap_w=inf)
    found = fit(measured(truth, LLAMA_8B, 60, 7, noise=0.02, power=False), facts(truth), LLAMA_8B).calibration
    assert found.parameters.power_cap_w == inf
    assert median(errors(found.parameters, LLAMA_8B, truth, 8)) < 0.02


def test_two_threads_of_a_cpu_are_a_device_too() -> None:
    samples = measured(THREAD, SMOLLM2, 60, 12, noise=0.02, power=False, shares=(1, 2))
    device = DeviceFacts("a CPU", 2, None, 1000.0, graph_tokens=0, source="synthetic")
    found = fit(samples, device, SMOLLM2).calibration.parameters
    unseen = measured(THREAD, SMOLLM2, 60, 13, noise=0.0, power=False, shares=(1, 2))
    off = sorted(abs(exact(found, 2, SMOLLM2, sample).seconds / sample.seconds - 1) for sample in unseen)
    assert median(off) < 0.02
    assert off[int(0.9 * len(off))] < 0.05


def test_a_fit_needs_both_phases_alone() -> None:
    samples = [s for s in measured(CAPPED, LLAMA_8B, 30, 9, noise=0.0) if s.step.kind != "decode"]
    with pytest.raises(ConfigError, match="decode alone"):
        fit(samples, facts(CAPPED), LLAMA_8B)


def h200(model: str) -> tuple[list[Sample], DeviceFacts, ModelShape]:
    points = load_measurements(H200_POINTS / f"h200_{model}.samples.json")
    return [*points.fitted, *points.held_out], DeviceFacts(**points.device), points.shape


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama8b", "qwen3_4b"])
def test_the_form_of_the_model_explains_an_h200(model: str) -> None:
    """125 points of one run of bullet calibrate: each quarter predicted from the rest."""
    samples, device, shape = h200(model)
    found: dict[str, dict[str, list[float]]] = {}
    for quarter in range(4):
        train = [s for i, s in enumerate(samples) if i % 4 != quarter]
        unseen = samples[quarter::4]
        fitted = Estimator(fit(train, device, shape).calibration, shape)
        plain, linear = roofline(train, TOTAL, shape), linear_regression(train, TOTAL)
        for name, predict in (
            ("ours", lambda s, e=fitted: e.predict(s.step, s.partition, s.alongside).seconds),
            ("roofline", plain),
            ("linear", linear),
        ):
            for s in unseen:
                group = "beside" if s.alongside else "alone"
                off = abs(predict(s) / s.seconds - 1)
                found.setdefault(name, {}).setdefault(group, []).append(off)
    middle = {name: {group: median(off) for group, off in groups.items()} for name, groups in found.items()}
    assert middle["ours"]["alone"] < 0.04
    assert middle["ours"]["beside"] < 0.06
    assert middle["roofline"]["beside"] > 2 * middle["ours"]["beside"]
    assert middle["linear"]["beside"] > middle["ours"]["beside"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "other"), [("llama8b", "qwen3_4b"), ("qwen3_4b", "llama8b")])
def test_another_model_on_the_h200_needs_no_samples(model: str, other: str) -> None:
    samples, device, shape = h200(model)
    unseen, _, other_shape = h200(other)
    found = Estimator(fit(samples, device, shape).calibration, other_shape)
    off = [abs(found.predict(s.step, s.partition, s.alongside).seconds / s.seconds - 1) for s in unseen]
    assert median(off) < 0.06


def test_a_guess_at_its_bound_is_no_error() -> None:
    """A loaded machine with a small model seems to move next to nothing."""
    slow = [replace(s, seconds=3e3 * s.seconds) for s in measured(THREAD, SMOLLM2, 30, 12, noise=0.02, power=False)]
    device = DeviceFacts("a slow CPU", TOTAL, None, 1000.0, graph_tokens=0, source="synthetic")
    assert first_guess(slow, device, SMOLLM2).stream_bytes == BOUNDS["stream_bytes"][0]
    assert fit(slow, device, SMOLLM2).calibration.parameters.stream_bytes >= BOUNDS["stream_bytes"][0]


def test_errors_are_told_by_group() -> None:
    samples = measured(CAPPED, LLAMA_8B, 40, 10, noise=0.0)
    told = by_group(samples, lambda sample: sample.seconds * 1.1)
    assert set(told) == {"prefill alone", "decode alone", "mixed", "side by side"}
    assert sum(group["count"] for group in told.values()) == 40
    for group in told.values():
        assert group["median"] == pytest.approx(0.1)
        assert group["p90"] == pytest.approx(0.1)


def test_a_regression_repeats_what_it_was_made_of() -> None:
    """Times that are linear in counts are what a linear regression is for."""
    samples = [
        replace(s, seconds=1e-3 + 1e-5 * s.step.rows)
        for s in measured(CAPPED, LLAMA_8B, 200, 11, noise=0.0)
        if s.alongside is None and s.partition in (Partition(TOTAL, 0), Partition(0, TOTAL))
    ]
    predict = linear_regression(samples, TOTAL)
    assert median(abs(predict(s) / s.seconds - 1) for s in samples) < 0.02
