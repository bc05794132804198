"""One step by hand: what the roofs, the launch constants and the energy of a small step come to."""

from dataclasses import replace

import pytest

from bulletserve.core.operators import StepShape, operators
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.parameters import Parameters
from bulletserve.estimator.power import allowed_clock
from bulletserve.estimator.roofs import ALONE, WaveMemo, beside, body_at, roofs
from bulletserve.estimator.work import ModelWork, Work

SHAPE = ModelShape("llama", 2, 256, 512, 4, 2, 64, 1024, 512)
DEVICE = Parameters(
    matmul_flops=1e9,
    attention_flops=5e8,
    stream_bytes=1e9,
    attention_bytes=2e8,
    device_bytes=1e10,
    small_tile=1.0,
    knee=2.0,
    overlap=1.0,
    layer_s=1e-3,
    decode_layer_s=2e-3,
    tail_s=4e-3,
    host_layer_s=0.5,
    flop_j=1e-9,
    byte_j=1e-8,
    graph_tokens=64,
)
DECODE = StepShape.decode(16, 1600, 2)
PREFILL = StepShape.prefill([(32, 16)], 2, 16)
LAYER_GROUP = StepShape.prefill([(96, 0)], 1, 0)
WINDOWED = replace(SHAPE, sliding_window=20)
MIXED = StepShape.mixed([(32, 16)], 16, 1600, 2, 16)


def work(constants: Parameters, shape: ModelShape, step: StepShape) -> Work:
    return ModelWork(constants, shape).of(step)


@pytest.mark.parametrize(
    ("step", "launch_s", "least_s"),
    [
        (DECODE, 2 * 3e-3 + 4e-3, 0.0),
        (PREFILL, 2 * 1e-3 + 4e-3, 0.0),
        (LAYER_GROUP, 1e-3, 0.5),  # more rows than any graph has
        (MIXED, 2 * 3e-3 + 4e-3, 0.0),
        (StepShape.decode(100, 1600, 2), 2 * 3e-3 + 4e-3, 0.0),  # decode always replays a graph
    ],
)
def test_launch_constants(step: StepShape, launch_s: float, least_s: float) -> None:
    found = work(DEVICE, SHAPE, step)
    assert found.launch_s == pytest.approx(launch_s)
    assert found.least_s == least_s


@pytest.mark.parametrize("shape", [SHAPE, WINDOWED])
@pytest.mark.parametrize(
    "step", [DECODE, PREFILL, LAYER_GROUP, MIXED, DECODE._replace(layers=1), MIXED._replace(sampled=3)]
)
def test_energy_is_of_all_flops_and_bytes(shape: ModelShape, step: StepShape) -> None:
    found, listed = work(DEVICE, shape, step), operators(shape, step)
    assert found.sm_j == pytest.approx(1e-9 * sum(each.flops * each.count for each in listed))
    assert found.memory_j == pytest.approx(1e-8 * sum(each.bytes * each.count for each in listed))
    assert found.moved_s == pytest.approx(1e-10 * sum(each.bytes * each.count for each in listed))


def by_hand_s(step: StepShape, sms: float, clock: float) -> float:
    """C + sqrt(S^2 + D^2) of each kind of operator; on one SM products of whole tiles fill every wave. The head has the
    rows of the other products where all that runs are decode rows."""
    groups: dict[str, list[float]] = {}
    for each in operators(SHAPE, step):
        products = "head" if each.name == "head" and step.prefill_tokens else "products"
        name = products if each.m else each.name if each.flops else "rest"
        sums = groups.setdefault(name, [0.0, 0.0])
        sums[0] += each.flops * each.count
        sums[1] += each.bytes * each.count
    total = 0.0
    for name, (flops, moved) in groups.items():
        compute = flops / ((5e8 if "attention" in name else 1e9) * sms * clock)
        if name == "prefill_attention":  # half a tile of queries more for each key of a prompt
            compute *= 1 + 64 * step.prefill_context / step.prefill_pairs
        loads = moved / ((2e8 if name == "decode_attention" else 1e9) * sms * clock)
        total += compute + (loads**2 + (moved / 1e10) ** 2) ** 0.5
    return total


@pytest.mark.parametrize("step", [DECODE, PREFILL, MIXED])
@pytest.mark.parametrize("clock", [1.0, 0.5])
def test_seconds_by_hand(step: StepShape, clock: float) -> None:
    own = roofs(DEVICE, work(DEVICE, SHAPE, step), 1.0, 8, WaveMemo(DEVICE))
    found, *_ = body_at(own.rows, (clock**-DEVICE.overlap, clock**-DEVICE.knee, 1.0), DEVICE.knee, DEVICE.overlap)
    assert found == pytest.approx(by_hand_s(step, 1.0, clock), rel=1e-9)
    if clock == 1.0:
        assert own.body_s == pytest.approx(own.compute_s + own.memory_s), "full waves lose nothing"


def test_contention_by_hand() -> None:
    """A neighbour that uses the whole bandwidth and computes on all other SMs."""
    constants = replace(DEVICE, bandwidth_taken=0.5, compute_slowed=0.25, stream_slowed=0.1)
    own = roofs(constants, work(constants, SHAPE, DECODE), 1.0, 8, WaveMemo(constants))
    slowed = beside(constants, own._replace(used=1.0, computing=7 / 8))
    slow_c, slow_s, slow_d, *waits = slowed
    assert waits == pytest.approx([0.25, 0.1])
    assert slow_c == pytest.approx(1.25)
    assert slow_s == pytest.approx(1.1**2), "the memory is busier than the SMs"
    assert slow_d == pytest.approx(2.0**2)
    _, less_s, least_d, *_ = beside(constants, own._replace(used=0.0, computing=7 / 8))
    assert less_s == pytest.approx((1 + 0.1 * 7 / 8) ** 2)
    assert least_d == 1.0
    seconds, *_ = body_at(own.rows, (slow_c, slow_s, slow_d), 2.0, 1.0)
    assert seconds == pytest.approx(sum(c * slow_c + (s * slow_s + d * slow_d) ** 0.5 for c, s, d in own.rows))
    assert allowed_clock(constants, ((own, slowed),)).body_s[0] == pytest.approx(seconds), "at the highest clock"


def test_the_slower_of_clock_and_loads_sets_the_pace() -> None:
    """A neighbour that makes loads take half as long again costs half as much again at the highest clock, and nothing
    at half of it."""
    constants = replace(DEVICE, overlap=1.0, compute_slowed=0.5)
    own = roofs(constants, work(constants, SHAPE, PREFILL), 1.0, 8, WaveMemo(constants))
    own = own._replace(rows=((1.0, 1e-30, 1e-30),), launch_s=0.0, least_s=0.0, sm_j=1.0, memory_j=0.0)
    slow = beside(constants, own._replace(used=1.0))
    at = {cap_w: replace(constants, voltage=1.0, power_cap_w=constants.static_w + cap_w) for cap_w in (1.0, 0.25)}
    assert allowed_clock(at[1.0], ((own, ALONE),)).body_s[0] == pytest.approx(1.0)
    assert allowed_clock(at[1.0], ((own, slow),)).body_s[0] == pytest.approx(1.5)
    assert allowed_clock(at[0.25], ((own, ALONE),)).body_s[0] == pytest.approx(2.0, rel=1e-3)
    assert allowed_clock(at[0.25], ((own, slow),)).body_s[0] == pytest.approx(2.0, rel=1e-2)


@pytest.mark.parametrize("step", [DECODE, PREFILL, MIXED])
@pytest.mark.parametrize("joins", [(2.0, 1.0), (5.0, 3.0)])
def test_how_seconds_fall_with_the_clock(step: StepShape, joins: tuple[float, float]) -> None:
    """Against a difference of seconds at two clocks."""
    knee, overlap = joins
    constants = replace(DEVICE, knee=knee, overlap=overlap)
    own = roofs(constants, work(constants, SHAPE, step), 4.0, 8, WaveMemo(constants))
    at = [body_at(own.rows, (x**-overlap, x**-knee, 1.0), knee, overlap)[0] for x in (0.9999, 1.0001)]
    falling = sum(body_at(own.rows, ALONE[:3], knee, overlap)[1:])
    assert falling == pytest.approx((at[0] - at[1]) / 2e-4, rel=1e-6)


def test_what_a_neighbour_sees() -> None:
    """`used` is the share of the bandwidth, `computing` that of the device's SMs times the time they compute."""
    own = roofs(DEVICE, work(DEVICE, SHAPE, PREFILL), 2.0, 8, WaveMemo(DEVICE))
    seconds = own.body_s + own.launch_s
    moved = sum(each.bytes * each.count for each in operators(SHAPE, PREFILL))
    assert own.used == pytest.approx(moved / 1e10 / seconds)
    assert own.computing == pytest.approx(own.compute_s / seconds * 2 / 8)
