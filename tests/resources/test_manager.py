"""Partitions from what a driver grants, with a driver that is not one."""

import logging
import subprocess
import sys

import pytest
import torch

from bulletserve.core.errors import ConfigError, DeviceError
from bulletserve.core.partition import Partition
from bulletserve.core.plan import Lane
from bulletserve.resources import green_context
from bulletserve.resources.green_context import SmPool, Split
from bulletserve.resources.manager import PartitionManager, usual_shares
from tests.resources.fake_driver import FakeDriver, Status, pretend_a_gpu

OUT_OF_MEMORY = Status("CUDA_ERROR_OUT_OF_MEMORY", 2)
NOT_SUPPORTED = Status("CUDA_ERROR_NOT_SUPPORTED", 801)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    pretend_a_gpu(monkeypatch, fake)
    return fake


def test_the_lattice_holds_the_usual_splits_and_all_to_one_lane(driver: FakeDriver) -> None:
    manager = PartitionManager(0)
    decode = (80, 64, 56, 48, 40, 32, 24, 16)
    assert manager.lattice.splits == tuple(Partition(132 - n, n) for n in decode)
    assert {Partition(132, 0), Partition(0, 132)} < set(manager.lattice.partitions)
    assert manager.mechanism == "green contexts"
    assert "116+16" in manager.describe()


def test_granted_is_not_asked_and_equal_grants_are_one_partition(driver: FakeDriver) -> None:
    manager = PartitionManager(0, decode_shares=(13, 16, 30))
    assert manager.lattice.splits == (Partition(100, 32), Partition(116, 16))


def test_a_lookup_gives_the_stream_on_that_share_and_makes_no_call(driver: FakeDriver) -> None:
    manager = PartitionManager(0)
    calls = len(driver.calls)
    for partition in manager.lattice.partitions:
        for lane, sms in ((Lane.PREFILL, partition.prefill_sms), (Lane.DECODE, partition.decode_sms)):
            if sms == 0:
                continue
            stream = manager.stream(lane, sms)
            assert stream is manager.stream(lane, sms)
            if sms == 132:
                assert stream.priority == (-5 if lane is Lane.DECODE else 0)
            else:
                assert driver.sms_of[stream.cuda_stream] == sms
                assert driver.priorities[stream.cuda_stream] == (-5 if lane is Lane.DECODE else 0)
    assert len(driver.calls) == calls
    with pytest.raises(KeyError):
        manager.stream(Lane.DECODE, 17)


def handles(manager: PartitionManager) -> set[int]:
    return {
        manager.stream(lane, sms).cuda_stream
        for partition in manager.lattice.splits
        for lane, sms in ((Lane.PREFILL, partition.prefill_sms), (Lane.DECODE, partition.decode_sms))
    }


def test_closing_waits_and_the_next_manager_takes_the_same_streams(driver: FakeDriver) -> None:
    first = PartitionManager(0)
    beside = PartitionManager(0)
    assert not handles(first) & handles(beside)
    taken = handles(first)
    made = driver.alive()
    calls = len(driver.calls)
    streams = [first.stream(Lane.DECODE, sms) for sms in first.lattice.decode_shares]
    streams += [first.stream(Lane.PREFILL, sms) for sms in first.lattice.prefill_shares]
    first.close()
    first.close()
    assert driver.calls[calls:] == []
    assert [stream.waits for stream in streams] == [1] * len(streams)
    with pytest.raises(KeyError):
        first.stream(Lane.DECODE, 132)
    assert handles(PartitionManager(0)) == taken
    assert driver.alive() == made


@pytest.mark.parametrize(
    "call",
    ["cuDeviceGet", "cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc"]
    + ["cuGreenCtxCreate", "cuGreenCtxStreamCreate"],
)
@pytest.mark.parametrize("fails_after", [0, 3])
def test_a_refused_call_is_a_named_error_and_what_was_built_is_kept_for_the_next(
    driver: FakeDriver, call: str, fails_after: int
) -> None:
    driver.fails[call] = OUT_OF_MEMORY
    driver.fails_after = fails_after
    with pytest.raises(DeviceError, match=rf"{call} failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        PartitionManager(0)
    assert driver.alive() == 4 * idle_splits()
    driver.fails.clear()
    PartitionManager(0)
    assert driver.alive() == 4 * 8


def idle_splits() -> int:
    return sum(map(len, green_context._idle.values()))


def test_half_a_split_is_destroyed_each_stream_before_its_context(driver: FakeDriver) -> None:
    driver.fails["cuGreenCtxStreamCreate"] = OUT_OF_MEMORY
    driver.fails_after = 1
    with pytest.raises(DeviceError):
        PartitionManager(0)
    assert [call for call in driver.calls if call[0].endswith("Destroy")] == [
        ("cuGreenCtxDestroy", 3),
        ("cuStreamDestroy", 2),
        ("cuGreenCtxDestroy", 1),
    ]


def test_a_group_that_leaves_nothing_is_refused(driver: FakeDriver) -> None:
    driver.total = 16
    with pytest.raises(DeviceError, match="16 of 16 SMs"):
        Split(0, 16, 0, 0)


@pytest.mark.parametrize("call", ["cuDeviceGetDevResource", "cuGreenCtxCreate", "cuGreenCtxStreamCreate"])
@pytest.mark.parametrize("fails_after", [0, 3])
def test_without_green_contexts_both_lanes_share_everything(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture, call: str, fails_after: int
) -> None:
    driver.fails[call] = NOT_SUPPORTED
    driver.fails_after = fails_after
    manager = PartitionManager(0)
    assert manager.lattice.splits == (Partition(132, 132),)
    assert manager.mechanism == "stream priorities"
    assert manager.describe().startswith("stream priorities")
    assert manager.stream(Lane.DECODE, 132).priority == -5
    assert manager.stream(Lane.PREFILL, 132).priority == 0
    assert f"{call} is not supported here" in caplog.text
    assert driver.alive() == 4 * idle_splits()
    streams = [manager.stream(lane, 132) for lane in Lane]
    manager.close()
    assert [stream.waits for stream in streams] == [1, 1]


def test_why_there_are_no_green_contexts_is_said_with_the_fix(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert PartitionManager(0).mechanism == "stream priorities"
        return caplog.text

    driver.version = 12040
    assert "CUDA 12.4" in (text := logged())
    assert "install an NVIDIA driver" in text

    def no_driver() -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(driver, "cuDriverGetVersion", no_driver)
    assert "libcuda" in logged()
    monkeypatch.delattr(FakeDriver, "cuGreenCtxStreamCreate")
    assert "has no cuGreenCtxStreamCreate" in logged()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    assert "pip install 'bulletserve[cuda]'" in logged()


def test_a_gpu_too_small_to_split(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pretend_a_gpu(monkeypatch, FakeDriver(total=8))
    assert PartitionManager(0).lattice.splits == (Partition(8, 8),)
    assert "too few to split" in caplog.text


@pytest.mark.parametrize(
    ("pool", "shares"),
    [
        (SmPool(132, 8, 8), (16, 24, 32, 40, 48, 56, 64, 80)),
        (SmPool(114, 8, 8), (16, 24, 32, 40, 48, 56, 72)),
        (SmPool(108, 4, 2), (14, 20, 26, 32, 40, 46, 52, 66)),
        (SmPool(20, 4, 2), (4, 6, 8, 10, 12)),
        (SmPool(16, 8, 8), (8,)),
        (SmPool(8, 8, 8), ()),
    ],
)
def test_the_usual_shares_are_scaled_to_the_gpu(pool: SmPool, shares: tuple[int, ...]) -> None:
    assert usual_shares(pool) == shares


@pytest.mark.parametrize("shares", [(), (8, 16, 24, 32, 40, 48, 56, 64, 72), (0,), (132,), (129,)])
def test_shares_that_cannot_be_are_refused_with_what_can(driver: FakeDriver, shares: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"16, 24, 32|give 1 to 8"):
        PartitionManager(0, shares)
    assert not driver.alive()


def test_no_usable_gpu_is_said_with_the_fix(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no GPU 1"):
        PartitionManager(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="nvidia-smi"):
        PartitionManager(0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="pip install"):
        PartitionManager(0)


def test_importing_needs_neither_triton_nor_cuda_bindings() -> None:
    code = (
        "import sys; sys.modules['triton'] = sys.modules['cuda'] = None\n"
        "import bulletserve.resources.manager\nfrom bulletserve.core.errors import ConfigError\n"
        "from bulletserve.resources import probe\n"
        "try: probe._sm_id_kernel()\nexcept ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'bulletserve[cuda]'" in done.stdout
