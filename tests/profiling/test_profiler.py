"""Points on a made-up device, where times are known, and on a small engine, where all must just run."""

from math import inf, nan

import pytest

from bulletserve.core.errors import EngineError
from bulletserve.core.partition import Partition
from bulletserve.core.snapshot import Limits
from bulletserve.profiling.design import make_design
from bulletserve.profiling.driver import Driver
from bulletserve.profiling.engine_sources import EngineSources
from bulletserve.profiling.points import DecodeLoad, Point, PromptLoad
from bulletserve.profiling.profiler import Pace, Profiler, faster
from bulletserve.profiling.scope import cpu_scope
from bulletserve.profiling.traces import TooFewSteps
from tests.engine.small_engine import SHAPE, small_engine
from tests.profiling.fake_device import DECODE_MS, GAP_MS, GROUP_MS, MIXED_MS, SLOWER_TOGETHER, FakeDevice

ROWS, PROMPTS = DecodeLoad(8, 500), PromptLoad(1, 2048)


class FakeMeter:
    """A card that always draws the same."""

    def __init__(self, watts: float = 400.0, mhz: float = 1500.0) -> None:
        self.figures = watts, mhz
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1

    def sample(self) -> None: ...

    def end(self, until_s: float = inf) -> tuple[float, float]:
        return self.figures


def profiler(device: FakeDevice, meter: FakeMeter | None = None) -> Profiler:
    limits = Limits(32, 16, 10_000, 64, 8 * 2048, 2112, device.lattice)
    driver = Driver(device, device, meter, now_s=device.now_s)  # type: ignore[arg-type]
    return Profiler(driver, EngineSources(limits, 1000))


def test_decode_alone_is_a_sample_with_power_and_clock() -> None:
    meter = FakeMeter()
    (sample,) = profiler(FakeDevice(), meter).measure(Point(Partition(0, 32), rows=ROWS), Pace())
    assert sample.step.decode_rows == 8 and sample.step.layers == 32 and sample.alongside is None
    assert sample.partition == Partition(0, 32)
    assert sample.seconds == pytest.approx((DECODE_MS + GAP_MS) / 1e3)
    assert (sample.watts, sample.clock_mhz) == (400.0, 1500.0) and meter.begun


def test_a_prompt_counts_from_start_to_start_over_all_its_layer_groups() -> None:
    (sample,) = profiler(FakeDevice(), FakeMeter(nan, nan)).measure(Point(Partition(100, 0), PROMPTS), Pace())
    assert sample.step.prefill_tokens == 2048
    assert sample.seconds == pytest.approx(4 * (GROUP_MS + GAP_MS) / 1e3)
    assert sample.watts is None and sample.clock_mhz is None


def test_a_mixed_step_is_one_sample() -> None:
    (sample,) = profiler(FakeDevice()).measure(Point(Partition(132, 0), PromptLoad(1, 256, 1000), ROWS), Pace())
    assert sample.step.kind == "mixed" and sample.step.prefill_context == 1256
    assert sample.seconds == pytest.approx((MIXED_MS + GAP_MS) / 1e3)


def test_a_co_run_is_a_sample_of_each_lane() -> None:
    device = FakeDevice()
    prefill, decode = profiler(device).measure(Point(Partition(100, 32), PROMPTS, ROWS), Pace())
    assert prefill.alongside == decode.step and decode.alongside == prefill.step
    assert decode.seconds == pytest.approx((SLOWER_TOGETHER * DECODE_MS + GAP_MS) / 1e3)
    assert prefill.seconds == pytest.approx(4 * (SLOWER_TOGETHER * GROUP_MS + GAP_MS) / 1e3)
    assert device.most_queued == 2 and not device._ends
    seats = {seat.seat for launch in device.launches for seat in launch.seats}
    assert len(seats) == 8 + 3, "rows and prompts have seats of their own"


def test_a_step_that_fails_says_which_point() -> None:
    with pytest.raises(EngineError, match="decode 8x500 on 32: broken"):
        profiler(FakeDevice(fail_at=20)).measure(Point(Partition(0, 32), rows=ROWS), Pace())


def test_a_run_without_whole_prompts_is_too_few() -> None:
    """Prompts that are seated once in 30 s give nothing to count."""
    device = FakeDevice()
    slow = profiler(device)
    slow._sources = EngineSources(Limits(4000, 16, 10_000, 64, 2048, 2112, device.lattice), 1000)
    with pytest.raises(TooFewSteps):
        slow.measure(Point(Partition(100, 0), PROMPTS), Pace())


def test_of_two_runs_the_faster_counts_lane_by_lane() -> None:
    point = Point(Partition(100, 32), PROMPTS, ROWS)
    prefill, decode = profiler(FakeDevice()).measure(point, Pace())
    slower = tuple(type(s)(s.step, s.partition, s.alongside, 2 * s.seconds) for s in (prefill, decode))
    assert faster(None, slower) == slower
    assert faster((slower[0], decode), (prefill, slower[1])) == (prefill, decode)


def test_a_whole_design_runs_on_the_cpu_engine() -> None:
    pace = Pace(warm_s=0.0, seconds=0.01, steps=3, prompts=2)
    with small_engine(total_blocks=400, max_seqs=16) as engine:
        scope = cpu_scope(engine.limits, 400, SHAPE.parameters, quick=True)
        made = make_design(engine.limits.lattice, scope.reach, scope.fit, scope.held_out)
        sources = EngineSources(engine.limits, SHAPE.vocab_size, scope.growth_tokens)
        found = Profiler(Driver(engine.executor, engine.inbox), sources)
        points = (*made.fit, *made.held_out)
        samples = [sample for point in points for sample in found.measure(point, pace)]
        assert {point.kind for point in points} == {"prefill", "decode", "mixed", "co-run"}
        assert len(samples) == sum(point.samples for point in points)
        assert all(0 < sample.seconds < 5 and sample.watts is None for sample in samples)
        assert {sample.step.layers for sample in samples} == {SHAPE.num_layers}
        prompts = {sample.step.prefill_tokens for sample in samples if sample.step.kind == "prefill"}
        assert len(prompts) > 1
