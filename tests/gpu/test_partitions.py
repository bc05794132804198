"""Partitions on a real GPU: kernels run where they should, lanes do not wait for each other, nothing leaks."""

import random
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from bulletserve.core.plan import Lane
from bulletserve.resources.manager import PartitionManager
from bulletserve.resources.probe import ProbeResult, probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a torch built for CUDA"),
]


@pytest.fixture(scope="module")
def manager() -> Iterator[PartitionManager]:
    made = PartitionManager(0)
    if made.mechanism != "green contexts":
        pytest.skip("no green contexts on this GPU and driver")
    yield made
    made.close()


@pytest.fixture(scope="module")
def results(manager: PartitionManager) -> list[ProbeResult]:
    return probe(manager)


def shares_of(manager: PartitionManager, lane: Lane) -> list[int]:
    lattice = manager.lattice
    return sorted(lattice.prefill_shares if lane is Lane.PREFILL else lattice.decode_shares)


def test_every_stream_runs_on_its_share_and_on_no_sm_of_the_other_lane(
    manager: PartitionManager, results: list[ProbeResult]
) -> None:
    assert len(results) == 2 * len(manager.lattice.splits) + 2
    assert [result for result in results if not result.ok] == []
    for partition in manager.lattice.splits:
        prefill, decode = (result.sms_seen for result in results if result.partition == partition)
        assert (len(prefill), len(decode)) == (partition.prefill_sms, partition.decode_sms)
        assert not prefill & decode


def test_the_probe_says_the_same_each_time(manager: PartitionManager, results: list[ProbeResult]) -> None:
    for _ in range(3):
        assert probe(manager) == results


def test_a_graph_keeps_the_sms_it_was_captured_on(results: list[ProbeResult]) -> None:
    assert [result for result in results if not result.graph_keeps_sms] == []


def test_decode_streams_have_the_higher_priority(manager: PartitionManager) -> None:
    prefill = {manager.stream(Lane.PREFILL, sms).priority for sms in shares_of(manager, Lane.PREFILL)}
    decode = {manager.stream(Lane.DECODE, sms).priority for sms in shares_of(manager, Lane.DECODE)}
    assert prefill == {0}
    assert max(decode) < 0
    assert len(decode) == 1


@pytest.mark.parametrize(("busy", "free"), [(Lane.PREFILL, Lane.DECODE), (Lane.DECODE, Lane.PREFILL)])
def test_no_stream_waits_for_one_of_the_other_lane(manager: PartitionManager, busy: Lane, free: Lane) -> None:
    """Streams that had to share a hardware queue would run one after the other."""
    waited = []
    for busy_sms, free_sms in product(shares_of(manager, busy), shares_of(manager, free)):
        torch.cuda.synchronize()
        with torch.cuda.stream(manager.stream(busy, busy_sms)):
            torch.cuda._sleep(4_000_000)  # cycles of one thread: 2 ms or more
            end_of_long = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(manager.stream(free, free_sms)):
            torch.cuda._sleep(1000)
            torch.cuda.current_stream().record_event().synchronize()
        if end_of_long.query():
            waited.append((busy_sms, free_sms))
    assert waited == []


def test_work_handed_from_share_to_share_stays_in_order(manager: PartitionManager) -> None:
    """Two lanes change their streams at random; each has its own number to count up, by kernels of odd lengths."""
    rng = random.Random(3)
    steps = 3000
    size = 1_000_003
    counts = {lane: torch.zeros(size, device=manager.device) for lane in Lane}
    torch.cuda.synchronize()
    last = {lane: torch.cuda.Event() for lane in Lane}
    for _ in range(steps):
        for lane in Lane:
            stream = manager.stream(lane, rng.choice(shares_of(manager, lane)))
            stream.wait_event(last[lane])
            with torch.cuda.stream(stream):
                counts[lane].mul_(-1.0).sub_(1.0).abs_() if rng.random() < 0.5 else counts[lane].add_(1.0)
            last[lane].record(stream)
    torch.cuda.synchronize()
    for lane in Lane:
        assert torch.equal(counts[lane], torch.full((size,), float(steps), device=manager.device))


def test_closing_and_building_again_leaks_nothing() -> None:
    PartitionManager(0).close()
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info(0)
    for _ in range(20):
        made = PartitionManager(0)
        for lane in Lane:
            for sms in shares_of(made, lane):
                with torch.cuda.stream(made.stream(lane, sms)):
                    torch.cuda._sleep(1000)
        made.close()
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info(0)
    assert before - after < 4 * 2**20
