from dataclasses import fields
from math import sqrt
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulletserve.core.launch import Launch
from bulletserve.core.plan import DecodeStep, Lane, MixedStep, PrefillGroup
from bulletserve.core.snapshot import LaneState, Limits, PrefillProgress, Snapshot
from bulletserve.profiling.driver import Driver
from bulletserve.profiling.sources import BlockPool, DecodeRows, MixedChunks, Prompts, layer_groups
from bulletserve.profiling.traces import STANDARD_ERROR, window_s
from bulletserve.scheduler.batching import next_group
from tests.profiling.fake_device import (
    DECODE_MS,
    GAP_MS,
    GROUP_MS,
    MIXED_MS,
    SLOWER_TOGETHER,
    FakeDevice,
    UnwatchedDevice,
)

BLOCK = 16
GROUPS = [(0, 8), (8, 16), (16, 24), (24, 32)]


def decode(pool: BlockPool, rows: int = 8, context: int = 500, sms: int = 32) -> DecodeRows:
    return DecodeRows(rows, context, sms, pool, BLOCK)


def prompts(pool: BlockPool, tokens: int = 2048, first_seat: int = 8) -> Prompts:
    return Prompts(tokens, 100, GROUPS, pool, BLOCK, first_seat=first_seat, vocabulary=1000)


def test_one_lane_is_measured_from_start_to_start():
    device = FakeDevice()
    found = Driver(device, device, now_s=device.now_s).run(decode(BlockPool(4000)), seconds=1.0).lanes[0]
    assert found.period_ms == pytest.approx(DECODE_MS + GAP_MS)
    assert found.median_ms == pytest.approx(DECODE_MS)
    assert max(found.gaps_ms) == pytest.approx(GAP_MS) == pytest.approx(min(found.gaps_ms))
    assert pytest.approx(found.steps, rel=0.05) == 1.0 / (DECODE_MS + GAP_MS) * 1e3
    assert device.most_queued == 2


def test_lanes_side_by_side_keep_each_two_deep():
    device = FakeDevice()
    pool = BlockPool(4000)
    run = Driver(device, device, now_s=device.now_s).run(decode(pool), prompts(pool), seconds=1.0)
    rows, groups = run.lanes
    assert rows.period_ms == pytest.approx(SLOWER_TOGETHER * DECODE_MS + GAP_MS)
    assert groups.prompt_ms == pytest.approx(len(GROUPS) * (SLOWER_TOGETHER * GROUP_MS + GAP_MS))
    assert groups.prompt_tokens_s == pytest.approx(2048 / groups.prompt_ms * 1e3)
    assert device.most_queued == 2
    assert not device._ends, "the lanes were drained"


def test_long_prompts_go_on_until_enough_of_them_are_whole():
    device = FakeDevice()
    found = Driver(device, device, now_s=device.now_s).run(prompts(BlockPool(4000)), seconds=0.01, least=3).lanes[0]
    assert found.prompt_ms == pytest.approx(len(GROUPS) * (GROUP_MS + GAP_MS))


def test_two_runs_of_one_driver_are_independent():
    device = FakeDevice()
    driver = Driver(device, device, now_s=device.now_s)
    first = driver.run(decode(BlockPool(4000)), seconds=0.5)
    second = driver.run(decode(BlockPool(4000)), seconds=0.5)
    assert first.lanes[0].period_ms == pytest.approx(second.lanes[0].period_ms)
    ids = [launch.step_id for launch in device.launches]
    assert len(set(ids)) == len(ids)


def test_a_device_that_cannot_be_observed_is_timed_by_what_it_reports():
    pool, other = BlockPool(4000), BlockPool(4000)
    device, watched = UnwatchedDevice(), FakeDevice()
    run = Driver(device, device, now_s=device.now_s).run(decode(pool), prompts(pool), seconds=1.0)
    seen = Driver(watched, watched, now_s=watched.now_s).run(decode(other), prompts(other), seconds=1.0)
    for lane, expected in zip(run.lanes, seen.lanes, strict=True):
        assert lane.period_ms == pytest.approx(expected.period_ms)
        assert lane.prompt_ms == pytest.approx(expected.prompt_ms, nan_ok=True)
        assert lane.late == 0


def test_a_failed_step_ends_the_run_and_leaves_nothing_behind():
    device = FakeDevice(fail_at=30)
    driver = Driver(device, device, now_s=device.now_s)
    with pytest.raises(RuntimeError, match="broken"):
        driver.run(decode(BlockPool(4000)))
    assert not device._ends and device.before_step is None
    driver.run(decode(BlockPool(4000)), seconds=0.2)


def test_the_mean_context_of_the_measured_steps_is_the_wanted_one():
    device = FakeDevice()
    rows = decode(BlockPool(4000), rows=16, context=500)
    lengths: list[float] = []
    advance = rows.advance

    def noted():
        seats, blocks = advance()
        lengths.append(sum(rows.lengths()) / 16 - 1)
        return seats, blocks

    rows.advance = noted  # type: ignore[method-assign]
    found = Driver(device, device, now_s=device.now_s).run(rows, seconds=1.0).lanes[0]
    measured = lengths[-found.steps :]
    assert sum(measured) / len(measured) == pytest.approx(500, abs=4)


def test_rows_always_hold_the_blocks_they_write_to():
    pool = BlockPool(2000)
    rows = DecodeRows(20, 100, 32, pool, BLOCK, growth=64)
    tables: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    for step in range(200):
        if step == 60:
            rows.recentre(30)
        launch = rows.next(step)
        assert launch.step == DecodeStep(32) and launch.rows is rows.rows
        for seat in launch.seats:
            tables[seat.seat], lengths[seat.seat] = list(seat.blocks), seat.cached_tokens
        for row, block in launch.blocks:
            tables[row].append(block)
        for row in launch.rows:
            assert len(tables[row]) == lengths[row] // BLOCK + 1
            lengths[row] += 1
        assert [lengths[row] for row in launch.rows] == rows.lengths()
    held = [block for table in tables.values() for block in table]
    assert len(set(held)) == len(held) and 0 not in held


def test_prompts_are_cut_into_ranges_and_groups():
    source = Prompts(5000, 100, [(0, 20), (20, 32)], BlockPool(2000), BLOCK, first_seat=3, vocabulary=9, cut=4096)
    launches = [source.next(i) for i in range(8)]
    assert [launch.step.token_ranges[0] for launch in launches[:4]] == [(0, 4096)] * 2 + [(4096, 5000)] * 2
    assert [launch.step.layer_range for launch in launches[:4]] == [(0, 20), (20, 32)] * 2
    assert [bool(launch.seats) for launch in launches] == [True, False, False, False] * 2
    assert [launch.parts[0].samples for launch in launches[:4]] == [False, False, True, True]
    assert launches[0].parts == launches[1].parts
    assert launches[0].seats[0].seat == 3 and launches[4].seats[0].seat == 4
    assert len(launches[0].seats[0].blocks) == 313


def test_a_batch_of_prompts_with_a_cached_part():
    source = Prompts(
        300, 100, [(0, 16), (16, 32)], BlockPool(200), BLOCK, first_seat=4, vocabulary=9, cached=200, count=2
    )
    first, second, third = (source.next(i) for i in range(3))
    assert [seat.seat for seat in first.seats] == [4, 5] and [seat.seat for seat in third.seats] == [6, 7]
    assert all(seat.cached_tokens == 200 and len(seat.blocks) == 19 for seat in first.seats)
    assert first.parts == second.parts and not second.seats
    assert [(part.start, part.end, part.samples) for part in first.parts] == [(200, 300, True)] * 2
    assert first.step.token_ranges == ((200, 300),) * 2
    blocks = [block for seat in (*first.seats, *third.seats) for block in seat.blocks]
    assert len(set(blocks)) == len(blocks)


def test_prompts_with_a_cached_part_are_counted_by_what_is_computed():
    device = FakeDevice()
    source = Prompts(2048, 100, GROUPS, BlockPool(4000), BLOCK, first_seat=0, vocabulary=9, cached=1024, count=2)
    found = Driver(device, device, now_s=device.now_s).run(source, seconds=1.0).lanes[0]
    assert found.prompt_ms == pytest.approx(len(GROUPS) * (GROUP_MS + GAP_MS))
    assert found.prompt_tokens_s == pytest.approx(2 * 1024 / found.prompt_ms * 1e3)


def test_mixed_steps_at_one_place_of_their_prompts_are_all_alike():
    pool = BlockPool(4000)
    source = MixedChunks(decode(pool), 100, 700, 132, pool, BLOCK, 1000, cached=600)
    for step in range(12):
        (part,) = source.next(step).parts
        assert (part.start, part.end, part.samples) == (600, 700, True)


def test_layer_groups_are_those_of_the_scheduler():

    values = {field.name: 32 for field in fields(Limits)} | {
        "group_token_layers": 11_000,
        "lattice": FakeDevice.lattice,
    }
    limits = Limits(**values)  # type: ignore[arg-type]
    for tokens in (600, 1000, 2048, 4096, 8192, 30000):
        found = []
        layer = 0
        while layer < limits.num_layers:
            progress = PrefillProgress((1,), ((0, tokens),), layer)
            idle = LaneState()
            snapshot = Snapshot(0.0, limits, (), 0, 0, (), 0, (), progress, 0, 0, 0, (), 0, (), 0, 0, 0, idle, idle)
            group = next_group(snapshot, 0, 100)
            assert isinstance(group, PrefillGroup)
            found.append(group.layer_range)
            layer = group.layer_range[1]
        assert layer_groups(tokens, limits.num_layers, limits.group_token_layers, 512) == found
    assert layer_groups(512, 32, 11000, 512) == [(0, 32)]


@pytest.mark.parametrize("chunk", [128, 480, 512, 1920, 2048])
def test_mixed_chunks_are_full_and_read_prompts_in_order(chunk: int):
    pool = BlockPool(4000)
    rows = decode(pool, rows=8, context=200, sms=132)
    source = MixedChunks(rows, chunk, 2048, 132, pool, BLOCK, 1000)
    done: dict[int, int] = {}
    recent: list[set[int]] = []
    for step in range(60):
        launch = source.next(step)
        assert isinstance(launch.step, MixedStep) and launch.lane is Lane.PREFILL
        assert sum(part.end - part.start for part in launch.parts) == chunk
        assert launch.rows is rows.rows
        taken = {seat.seat for seat in launch.seats} - set(launch.rows)
        assert not taken & set().union(*recent[-1:]), "a prompt under way lost its seat"
        for part in launch.parts:
            assert part.start == (0 if part.seat in taken else done[part.seat])
            assert part.samples == (part.end == 2048)
            done[part.seat] = part.end
        recent.append({part.seat for part in launch.parts})


def test_mixed_steps_count_prompt_tokens_of_chunks():
    device = FakeDevice()
    pool = BlockPool(4000)
    source = MixedChunks(decode(pool), 512, 2048, 132, pool, BLOCK, 1000)
    found = Driver(device, device, now_s=device.now_s).run(source, seconds=1.0).lanes[0]
    assert found.period_ms == pytest.approx(MIXED_MS + GAP_MS)
    assert found.prompt_tokens_s == pytest.approx(512 / found.period_ms * 1e3)


def test_a_pool_says_when_it_is_empty():
    pool = BlockPool(10)
    assert len({*pool.take(4), *pool.take(6)}) == 10
    with pytest.raises(ValueError, match="1 cache blocks wanted, 0 are left"):
        pool.take(1)


class UnsteadyDevice(FakeDevice):
    """Every second decode step takes twice as long."""

    def took_ms(self, launch: Launch) -> float:
        return super().took_ms(launch) * (1 + launch.step_id % 2)


@pytest.mark.parametrize(("device", "measured_s"), [(FakeDevice(), 0.3), (UnsteadyDevice(), 1.0)])
def test_steps_that_differ_are_measured_for_longer(device: FakeDevice, measured_s: float):
    rows = decode(BlockPool(4000))
    found = Driver(device, device, now_s=device.now_s).run(rows, seconds=1.0, shortest_s=0.3).lanes[0]
    assert found.steps * found.period_ms / 1e3 == pytest.approx(measured_s, rel=0.1)


@pytest.mark.parametrize("shortest_s", [0.2, 0.5])
def test_contexts_are_centred_on_the_window_that_was_chosen(shortest_s: float):
    device = FakeDevice()
    rows = decode(BlockPool(4000), context=500)
    Driver(device, device, now_s=device.now_s).run(rows, seconds=1.0, shortest_s=shortest_s)
    steps = shortest_s * 1e3 / (DECODE_MS + GAP_MS)
    assert sum(rows.lengths()) / 8 == pytest.approx(500 + steps / 2, abs=8)


@given(st.lists(st.floats(5.0, 15.0), max_size=60), st.floats(0.1, 0.5), st.floats(0.5, 2.0))
def test_a_window_is_as_long_as_its_mean_wants(periods_ms: list[float], shortest_s: float, longest_s: float):
    starts_ms = [sum(periods_ms[:i]) for i in range(len(periods_ms) + 1)]
    found_s = window_s(starts_ms, shortest_s, longest_s)
    assert shortest_s <= found_s <= longest_s
    if len(periods_ms) < 4:
        assert found_s == longest_s
    elif found_s > shortest_s + 1e-9:
        worst = stdev(periods_ms) / mean(periods_ms) / sqrt(found_s / mean(periods_ms) * 1e3)
        assert worst <= STANDARD_ERROR * 1.001 or found_s == longest_s
