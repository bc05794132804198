"""Forecasts behave as physics does, whatever the device: property tests over steps, shares and constants."""

import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.errors import ConfigError
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.samples import Sample
from bulletserve.estimator.errors import exact
from bulletserve.estimator.estimator import Estimator, Forecast, shares
from bulletserve.estimator.parameters import Parameters
from tests.estimator.devices import CAPPED, LLAMA_8B, QWEN_1_7B, TOTAL, UNCAPPED, calibration

LAYERS = LLAMA_8B.num_layers
SOLVED = 1 + 1e-4
"""The clock, and what follows from it, is found so well."""


@st.composite
def devices(draw: st.DrawFn) -> Parameters:
    """Constants around those of two known devices."""
    base = draw(st.sampled_from([CAPPED, UNCAPPED]))
    varied = ("matmul_flops", "attention_bytes", "stream_bytes", "device_bytes", "flop_j", "byte_j", "layer_s")
    changes = {name: getattr(base, name) * draw(st.floats(0.5, 2.0)) for name in varied}
    return replace(
        base,
        **changes,
        knee=draw(st.floats(1.5, 12.0)),
        overlap=draw(st.floats(1.0, 12.0)),
        voltage=draw(st.floats(0.3, 2.5)),
        small_tile=draw(st.floats(0.6, 1.0)),
        split_loss=draw(st.floats(0.01, 0.5)),
        bandwidth_taken=draw(st.floats(0.01, 1.0)),
        compute_slowed=draw(st.floats(0.001, 1.0)),
        stream_slowed=draw(st.floats(0.001, 1.0)),
        power_cap_w=draw(st.sampled_from([350.0, 700.0, inf])),
    )


prompts = st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 12000)), min_size=1, max_size=3)
prefills = st.builds(StepShape.prefill, prompts, st.integers(1, LAYERS), st.integers(0, 3))


@st.composite
def decodes(draw: st.DrawFn) -> StepShape:
    rows = draw(st.integers(1, 256))
    return StepShape.decode(rows, rows * draw(st.integers(1, 16384)), LAYERS)


@st.composite
def mixed_steps(draw: st.DrawFn) -> StepShape:
    decode = draw(decodes())
    return StepShape.mixed(draw(prompts), decode.decode_rows, decode.decode_context, LAYERS, decode.decode_rows)


def estimator(constants: Parameters) -> Estimator:
    return Estimator(calibration(constants), LLAMA_8B)


def whole(step: StepShape) -> Partition:
    return Partition(0, TOTAL) if step.kind == "decode" else Partition(TOTAL, 0)


def check_parts(found: Forecast, constants: Parameters) -> None:
    assert sum(found[1:7]) == pytest.approx(found.seconds, rel=1e-9)
    assert min(found.compute_s, found.memory_s, found.launch_s) >= 0.0
    assert min(found.wave_loss_s, found.contention_s, found.clock_s) > -1e-9 * found.seconds
    assert found.seconds > 0.0
    assert found.joules > 0.0
    assert constants.least_clock <= found.clock_ratio <= 1.0
    assert constants.static_w < found.watts
    if found.clock_ratio > constants.least_clock:
        assert found.watts <= constants.power_cap_w * SOLVED


@given(devices(), st.one_of(prefills, decodes(), mixed_steps()))
def test_parts_add_up_alone(constants: Parameters, step: StepShape) -> None:
    found = estimator(constants).predict(step, whole(step))
    check_parts(found, constants)
    assert found.contention_s == 0.0
    assert found.joules == pytest.approx(found.watts * found.seconds, rel=SOLVED - 1)


@given(devices(), prefills, decodes(), st.integers(1, TOTAL - 1))
def test_side_by_side_is_never_faster_than_alone(
    constants: Parameters, prefill: StepShape, decode: StepShape, decode_sms: int
) -> None:
    device, split = estimator(constants), Partition(TOTAL - decode_sms, decode_sms)
    for step, other in ((prefill, decode), (decode, prefill)):
        beside, alone = device.predict(step, split, other), device.predict(step, split)
        check_parts(beside, constants)
        assert beside.seconds * SOLVED >= alone.seconds


@given(devices(), prefills, decodes(), st.integers(1, TOTAL - 1))
def test_both_lanes_see_one_clock(
    constants: Parameters, prefill: StepShape, decode: StepShape, decode_sms: int
) -> None:
    device, split = estimator(constants), Partition(TOTAL - decode_sms, decode_sms)
    one, other = device.predict(prefill, split, decode), device.predict(decode, split, prefill)
    assert one.clock_ratio == other.clock_ratio
    watts = one.joules / one.seconds + other.joules / other.seconds
    assert watts == pytest.approx(one.watts, rel=SOLVED - 1)


@given(devices(), st.one_of(prefills, decodes()), st.integers(1, TOTAL), st.integers(1, TOTAL))
def test_more_sms_are_never_slower(constants: Parameters, step: StepShape, a: int, b: int) -> None:
    """Wave steps included: fewer SMs never have fewer turns."""
    device, few, many = estimator(constants), min(a, b), max(a, b)
    decode = step.kind == "decode"
    slow, fast = (
        device.predict(step, Partition(0, sms) if decode else Partition(sms, 0)).seconds for sms in (few, many)
    )
    assert slow * SOLVED >= fast


@given(
    devices(),
    st.one_of(prefills, decodes(), mixed_steps()),
    st.sampled_from(StepShape._fields),
    st.integers(1, 5000),
)
def test_more_work_is_never_faster(constants: Parameters, step: StepShape, field: str, more: int) -> None:
    if field == "layers":
        more = 1 + more % 8
    if step.kind == "prefill" and field.startswith("decode"):
        return
    if step.kind == "decode" and field.startswith("prefill"):
        return
    greater = step._replace(**{field: getattr(step, field) + more})
    device = estimator(constants)
    assert device.predict(greater, whole(step)).seconds * SOLVED >= device.predict(step, whole(step)).seconds


@given(devices(), decodes(), prefills, st.integers(8, 124), st.floats(0.3, 1.0))
def test_a_lower_power_cap_is_never_faster(
    constants: Parameters, decode: StepShape, prefill: StepShape, decode_sms: int, share: float
) -> None:
    split = Partition(TOTAL - decode_sms, decode_sms)
    cap = max(600.0 * share, constants.static_w + 1.0)
    low, high = estimator(replace(constants, power_cap_w=cap)), estimator(replace(constants, power_cap_w=600.0))
    for step, other in ((prefill, decode), (decode, prefill)):
        capped, free = low.predict(step, split, other), high.predict(step, split, other)
        assert capped.clock_ratio <= free.clock_ratio * SOLVED
        assert capped.seconds * SOLVED >= free.seconds


@settings(max_examples=30)
@given(st.lists(st.tuples(decodes(), prefills, st.integers(8, 124)), min_size=2, max_size=8), st.randoms())
def test_the_memo_cannot_be_seen(questions: list[tuple[StepShape, StepShape, int]], rng: random.Random) -> None:
    """The same answers in any order, from one estimator and from a fresh one for each question."""
    asked = [(d, Partition(TOTAL - n, n), p) for d, p, n in questions]
    asked += [(p, split, d) for d, split, p in asked]
    one = estimator(CAPPED)
    first = [one.predict(*question) for question in asked]
    order = list(range(len(asked)))
    rng.shuffle(order)
    other = estimator(CAPPED)
    assert {i: other.predict(*asked[i]) for i in order} == dict(enumerate(first))
    assert [estimator(CAPPED).predict(*question) for question in asked] == first
    ready = estimator(CAPPED)
    ready.prepare(Lattice.of_splits(TOTAL, tuple(split for _, split, _ in asked)), 256, 8192)
    assert [ready.predict(*question) for question in asked] == first


@given(decodes(), prefills, st.integers(8, 124))
def test_rounding_to_the_grid_costs_less_than_its_steps(decode: StepShape, prefill: StepShape, decode_sms: int) -> None:
    """A wave step may lie between a count and its neighbour on the grid, so rows of prefill get a whole tile more."""
    split, device = Partition(TOTAL - decode_sms, decode_sms), estimator(UNCAPPED)
    for step, other in ((decode, prefill), (prefill, decode)):
        found = device.predict(step, split, other).seconds
        bare = exact(UNCAPPED, TOTAL, LLAMA_8B, Sample(step, split, other, 1.0)).seconds
        assert found == pytest.approx(bare, rel=0.04 if step is decode else 0.15)


@pytest.mark.parametrize("rows", [1, 4, 8, 31, 128])
def test_a_budget_that_fills_its_tiles_is_not_rounded_over_them(rows: int) -> None:
    """Prompt tokens and rows that are 1024 together are 1024 on the grid, though neither is on it."""
    device, budget = estimator(CAPPED), 1024
    full, more = (
        StepShape.mixed([(tokens, 0)], rows, 500 * rows, LAYERS, rows) for tokens in (budget - rows, budget - rows + 32)
    )
    bare = Sample(full, whole(full), None, 1.0)
    told = device.predict(full, whole(full)).seconds
    assert told == pytest.approx(exact(CAPPED, TOTAL, LLAMA_8B, bare).seconds, rel=0.03)
    assert device.predict(more, whole(more)).seconds > 1.03 * told, "the next tiles"


def test_neighbours_on_the_grid_are_one_forecast() -> None:
    device = estimator(CAPPED)
    split = Partition(68, 64)
    prefill = StepShape.prefill([(2040, 0)], LAYERS, 1)
    one = device.predict(StepShape.decode(127, 127_100, LAYERS), split, prefill)
    other = device.predict(StepShape.decode(128, 127_900, LAYERS), split, StepShape.prefill([(2048, 0)], LAYERS, 1))
    assert one is other


def test_the_memo_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulletserve.estimator.estimator._MOST_FORECASTS", 10)
    monkeypatch.setattr("bulletserve.estimator.estimator._MOST_STEPS", 5)
    device = estimator(CAPPED)
    steps = [StepShape.decode(rows, rows * 100, LAYERS) for rows in range(1, 60)]
    first = [device.predict(step, Partition(0, TOTAL)) for step in steps]
    assert [device.predict(step, Partition(0, TOTAL)) for step in steps] == first
    assert (len(device._forecasts), len(device._asked)) == (10, 5)


def test_the_neighbourhood_costs_what_it_should() -> None:
    """A decode beside a heavy prefill loses to bandwidth and clock; a device without a cap loses no clock."""
    decode, prefill = StepShape.decode(64, 64 * 4096, LAYERS), StepShape.prefill([(2048, 0)], LAYERS, 1)
    split = Partition(68, 64)
    capped = estimator(CAPPED).predict(decode, split, prefill)
    assert capped.contention_s > 0.0
    assert capped.clock_s > 0.0
    assert capped.watts == pytest.approx(CAPPED.power_cap_w, rel=1e-5)
    free = estimator(replace(CAPPED, power_cap_w=inf)).predict(decode, split, prefill)
    assert free.clock_s == 0.0
    assert free.clock_ratio == 1.0
    assert free.seconds < capped.seconds


def test_decode_has_a_knee_and_prefill_has_none() -> None:
    """Decode gets most of its speed from half of the SMs, prefill half of it."""
    device = estimator(UNCAPPED)
    decode, prefill = StepShape.decode(64, 64 * 2048, LAYERS), StepShape.prefill([(8192, 0)], LAYERS, 1)
    half, all_of_it = (device.predict(decode, Partition(0, sms)).seconds for sms in (66, TOTAL))
    assert half / all_of_it < 1.35
    half, all_of_it = (device.predict(prefill, Partition(sms, 0)).seconds for sms in (66, TOTAL))
    assert 1.8 < half / all_of_it < 2.1


def test_a_reused_prefix_costs_its_attention_only() -> None:
    device = estimator(UNCAPPED)
    fresh, reused, long = (
        device.predict(StepShape.prefill([prompt], LAYERS, 1), Partition(TOTAL, 0)).seconds
        for prompt in ((1024, 0), (1024, 8192), (9216, 0))
    )
    assert fresh < reused < 0.5 * long


def test_a_mixed_step_is_cheaper_than_its_parts_and_dearer_than_each() -> None:
    """Weights are read once for both."""
    device = estimator(UNCAPPED)
    rows, prompt = (32, 32 * 2048), [(480, 1024)]
    mixed = device.predict(StepShape.mixed(prompt, *rows, LAYERS, 32), Partition(TOTAL, 0)).seconds
    decode = device.predict(StepShape.decode(*rows, LAYERS), Partition(0, TOTAL)).seconds
    prefill = device.predict(StepShape.prefill(prompt, LAYERS, 0), Partition(TOTAL, 0)).seconds
    assert max(decode, prefill) < mixed < decode + prefill


def test_a_step_launched_one_by_one_waits_for_the_host() -> None:
    constants = replace(UNCAPPED, host_layer_s=5e-3, graph_tokens=512)
    device = Estimator(calibration(constants), QWEN_1_7B)
    eager, captured = (
        device.predict(StepShape.prefill([(tokens, 0)], 28, 1), Partition(TOTAL, 0)) for tokens in (520, 512)
    )
    assert eager.seconds == pytest.approx(28 * 5e-3)
    assert sum(eager[1:7]) == pytest.approx(eager.seconds)
    assert captured.seconds < 0.5 * eager.seconds


def test_two_lanes_on_a_device_that_cannot_be_split_share_it() -> None:
    decode, prefill = StepShape.decode(4, 400, LAYERS), StepShape.prefill([(64, 0)], LAYERS, 1)
    both = Partition(TOTAL, TOTAL)
    assert shares(decode, both, prefill, TOTAL) == (TOTAL / 2, TOTAL / 2)
    assert shares(decode, both, None, TOTAL) == (TOTAL, 0)
    assert shares(StepShape.mixed([(8, 0)], 1, 9, 2, 1), both, None, TOTAL) == (TOTAL, 0)


def test_impossible_questions_are_refused() -> None:
    device = estimator(CAPPED)
    decode, prefill = StepShape.decode(4, 400, LAYERS), StepShape.prefill([(64, 0)], LAYERS, 1)
    mixed = StepShape.mixed([(64, 0)], 4, 400, LAYERS, 4)
    for step, partition, other in (
        (decode, Partition(TOTAL, 0), None),
        (prefill, Partition(0, TOTAL), None),
        (decode, Partition(0, TOTAL), prefill),
        (decode, Partition(64, 64), decode),
        (prefill, Partition(64, 64), mixed),
        (mixed, Partition(64, 64), decode),
    ):
        with pytest.raises(ConfigError):
            device.predict(step, partition, other)


def test_a_forecast_says_why() -> None:
    decode, prefill = StepShape.decode(64, 64 * 4096, LAYERS), StepShape.prefill([(2048, 0)], LAYERS, 1)
    text = estimator(CAPPED).predict(decode, Partition(68, 64), prefill).describe()
    assert all(word in text for word in ("compute", "memory", "waves", "contention", "clock", "launch", "W", "ms"))
