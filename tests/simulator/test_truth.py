"""The truth: what a perturbation may do, what contention over the same SMs does, and measured points that come back."""

from dataclasses import replace
from math import exp, log
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.errors import ConfigError
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.samples import Sample
from bulletserve.estimator.calibration import Calibration, datasheet
from bulletserve.estimator.errors import exact
from bulletserve.measurements import load_measurements
from bulletserve.simulator.measured import MeasuredTruth
from bulletserve.simulator.truth import ModelTruth, effective_sms, perturbation
from tests.simulator.devices import LLAMA_8B, h200

LAYERS = LLAMA_8B.num_layers
plain = settings(max_examples=150, deadline=None)
H200_POINTS = Path(__file__).parents[1] / "estimator" / "data" / "h200_llama8b.samples.json"


def card() -> Calibration:
    found = datasheet("NVIDIA H200", 132)
    assert found is not None
    return found


def prefill(tokens: int, before: int = 0, layers: int = LAYERS) -> StepShape:
    return StepShape.prefill([(tokens, before)], layers, 1)


def decode(rows: int, context: int) -> StepShape:
    return StepShape.decode(rows, rows * context, LAYERS)


@given(share=st.floats(0, 0.5), seed=st.integers(0, 1000))
@plain
def test_no_factor_leaves_the_share_and_a_seed_is_a_device(share: float, seed: int) -> None:
    change = perturbation(share, seed)
    for factor in (*change.constants.values(), change.prefill, change.decode):
        assert 1 / (1 + share) - 1e-12 <= factor <= 1 + share + 1e-12
    assert change == perturbation(share, seed)
    assert (f"{share:.0%}" in change.describe()) == (share > 0)
    ModelTruth.perturbed(card(), LLAMA_8B, change)  # no constant leaves its bounds


def test_seeds_differ_and_a_share_must_be_one() -> None:
    assert perturbation(0.1, 1) != perturbation(0.1, 2)
    with pytest.raises(ConfigError, match="share from 0 to 1"):
        perturbation(1.5, 0)


@given(
    tokens=st.integers(1, 8192), before=st.integers(0, 20_000), rows=st.integers(1, 256), context=st.integers(1, 8000)
)
@plain
def test_without_a_perturbation_it_is_the_calibration(tokens: int, before: int, rows: int, context: int) -> None:
    truth = ModelTruth.perturbed(card(), LLAMA_8B, perturbation(0.0, 3))
    split = Partition(100, 32)
    for step, sms, other, other_sms in (
        (prefill(tokens, before), 100, decode(rows, context), 32),
        (decode(rows, context), 32, prefill(tokens, before), 100),
    ):
        beside = Sample(step, split, other, 1.0)
        model_s = exact(card().parameters, 132, LLAMA_8B, beside).seconds
        assert truth.beside(step, sms, other, other_sms).steady_s == pytest.approx(model_s, rel=0.01)
        alone_s = exact(card().parameters, 132, LLAMA_8B, Sample(step, split, None, 1.0)).seconds
        assert truth.alone(step, sms).steady_s == pytest.approx(alone_s, rel=0.01)


def test_a_phase_is_off_by_its_own_factor() -> None:
    calibration = card()
    exactly = ModelTruth(calibration.parameters, 132, LLAMA_8B)
    off = ModelTruth(calibration.parameters, 132, LLAMA_8B, prefill=1.1, decode=0.9)
    assert off.alone(prefill(2048), 132).steady_s == pytest.approx(1.1 * exactly.alone(prefill(2048), 132).steady_s)
    assert off.alone(decode(32, 1024), 32).steady_s == pytest.approx(0.9 * exactly.alone(decode(32, 1024), 32).steady_s)
    mixed = StepShape.mixed([(512, 0)], 32, 32 * 1024, LAYERS, 33)
    assert off.alone(mixed, 132).steady_s == pytest.approx((1.1 * 0.9) ** 0.5 * exactly.alone(mixed, 132).steady_s)


def test_token_counts_are_exact_where_waves_make_steps() -> None:
    """2048 rows fill their waves, 2049 begin another: no rounding may hide it, in either direction."""
    truth = ModelTruth(card().parameters, 132, LLAMA_8B)
    fits, over = (StepShape.mixed([(tokens, 0)], 40, 40 * 1024, LAYERS, 41) for tokens in (2008, 2009))
    assert truth.alone(over, 132).steady_s > truth.alone(fits, 132).steady_s
    assert (
        truth.alone(over, 132).steady_s
        != truth.alone(StepShape.mixed([(2024, 0)], 40, 40 * 1024, LAYERS, 41), 132).steady_s
    )


@given(prefill_sms=st.integers(1, 132), decode_sms=st.integers(1, 132))
@plain
def test_both_lanes_together_have_no_more_than_there_is(prefill_sms: int, decode_sms: int) -> None:
    decode_has, prefill_has = effective_sms(decode_sms, prefill_sms, 132)
    assert 0 < decode_has <= decode_sms and 0 < prefill_has <= prefill_sms
    assert decode_has + prefill_has == pytest.approx(min(132, prefill_sms + decode_sms))


def test_decode_on_a_share_beside_prefill_on_the_whole_device_starves() -> None:
    """Measured on the H200: 48 to 64 ms a step of 32 x 2048 on 32 or 64 SMs, 7 to 12 beside prefill on the rest."""
    truth = h200().truth(0)
    beside = truth.beside(decode(32, 2048), 32, prefill(2048), 100).steady_s
    starved = truth.beside(decode(32, 2048), 32, prefill(2048), 132).steady_s
    assert 2.5 * beside < starved < 6 * beside


def test_measured_points_come_back_and_fade_into_the_calibration() -> None:
    points = load_measurements(H200_POINTS).fitted
    model = ModelTruth(card().parameters, 132, LLAMA_8B)
    truth = MeasuredTruth(model, points)
    off = 0.0
    for one in points:
        sms, other_sms = one.partition.prefill_sms, one.partition.decode_sms
        if one.step.kind == "decode":
            sms, other_sms = other_sms, sms
        if one.alongside is None:
            found, plain_s = truth.alone(one.step, sms).steady_s, model.alone(one.step, sms).steady_s
        else:
            found = truth.beside(one.step, sms, one.alongside, other_sms).steady_s
            plain_s = model.beside(one.step, sms, one.alongside, other_sms).steady_s
        same = [log(o.seconds) for o in points if replace(o, seconds=0.0, watts=None, clock_mhz=None) == replace(
            one, seconds=0.0, watts=None, clock_mhz=None)]  # fmt: skip
        assert found == pytest.approx(exp(sum(same) / len(same)), rel=2e-3)
        off = max(off, abs(plain_s / one.seconds - 1))
    assert off > 0.05, "the datasheet alone would do"
    far = decode(1, 1)
    assert truth.alone(far, 16).steady_s == pytest.approx(model.alone(far, 16).steady_s, rel=0.1)
    half = prefill(2048, layers=LAYERS // 2)
    ratio = truth.alone(half, 132).steady_s / model.alone(half, 132).steady_s
    assert ratio == pytest.approx(
        truth.alone(prefill(2048), 132).steady_s / model.alone(prefill(2048), 132).steady_s, rel=0.02
    )
