"""A stand-in for `cuda.bindings.driver` and the little of torch.cuda that partitions need: it counts and hands out."""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bulletserve.resources import green_context


class Status:
    """A CUresult."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self._number = number

    def __int__(self) -> int:
        return self._number


SUCCESS = Status("CUDA_SUCCESS", 0)


def sms(count: int, **more: int) -> SimpleNamespace:
    return SimpleNamespace(sm=SimpleNamespace(smCount=count, **more))


class FakeDriver(ModuleType):
    """`calls` has every call that makes or destroys something, in order; `fails` maps a call to its bad status."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, total: int = 132, smallest: int = 8, step: int = 8, version: int = 13000) -> None:
        super().__init__("cuda.bindings.driver")
        self.total, self.smallest, self.step, self.version = total, smallest, step, version
        self.calls: list[tuple[str, int]] = []
        self.fails: dict[str, Status] = {}
        self.fails_after = 0
        self.priorities: dict[int, int] = {}
        self.sms_of: dict[int, int] = {}
        self._last_handle = 0

    def alive(self) -> int:
        """How many streams and contexts were made and not destroyed."""
        made = {handle for call, handle in self.calls if call.endswith("Create")}
        return len(made - {handle for call, handle in self.calls if call.endswith("Destroy")})

    def _answer(self, call: str, *values: object) -> tuple[object, ...]:
        status = self.fails.get(call, SUCCESS)
        if status is not SUCCESS and self.fails_after > 0:
            self.fails_after -= 1
            status = SUCCESS
        return (status, *values)

    def _made(self, call: str) -> tuple[object, ...]:
        answer = self._answer(call, self._last_handle + 1)
        if answer[0] is SUCCESS:
            self._last_handle += 1
            self.calls.append((call, self._last_handle))
        return answer

    def cuDriverGetVersion(self):  # noqa: N802
        return self._answer("cuDriverGetVersion", self.version)

    def cuDeviceGet(self, index: int):  # noqa: N802
        return self._answer("cuDeviceGet", index)

    def cuDeviceGetDevResource(self, device: int, kind: int):  # noqa: N802
        everything = sms(self.total, minSmPartitionSize=self.smallest, smCoscheduledAlignment=self.step)
        return self._answer("cuDeviceGetDevResource", everything)

    def cuDevSmResourceSplitByCount(self, groups: int, everything: SimpleNamespace, flags: int, least: int):  # noqa: N802
        granted = -(-max(least, self.smallest) // self.step) * self.step
        return self._answer("cuDevSmResourceSplitByCount", [sms(granted)], 1, sms(self.total - granted))

    def cuDevResourceGenerateDesc(self, resources: list[SimpleNamespace], count: int):  # noqa: N802
        return self._answer("cuDevResourceGenerateDesc", resources[0].sm.smCount)

    def cuGreenCtxCreate(self, described: int, device: int, flags: int):  # noqa: N802
        answer = self._made("cuGreenCtxCreate")
        self.sms_of[self._last_handle] = described
        return answer

    def cuGreenCtxStreamCreate(self, context: int, flags: int, priority: int):  # noqa: N802
        answer = self._made("cuGreenCtxStreamCreate")
        self.priorities[self._last_handle] = priority
        self.sms_of[self._last_handle] = self.sms_of[context]
        return answer

    def cuStreamDestroy(self, stream: int):  # noqa: N802
        self.calls.append(("cuStreamDestroy", stream))
        return self._answer("cuStreamDestroy")

    def cuGreenCtxDestroy(self, context: int):  # noqa: N802
        self.calls.append(("cuGreenCtxDestroy", context))
        return self._answer("cuGreenCtxDestroy")


class FakeStream:
    """A torch stream without a GPU."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1

    def priority_range(self) -> tuple[int, int]:
        return 0, -5


class FakeExternalStream(FakeStream):
    """A wrapped handle."""

    def __init__(self, handle: int, device: torch.device) -> None:
        super().__init__(device)
        self.cuda_stream = handle


def pretend_a_gpu(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    """torch and cuda-bindings say that there is one GPU with the SMs of `driver`."""
    properties = SimpleNamespace(multi_processor_count=driver.total)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda device: properties,
        "device": lambda device: nullcontext(),
        "synchronize": lambda device=None: driver.calls.append(("synchronize", 0)),
        "Stream": FakeStream,
        "ExternalStream": FakeExternalStream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(green_context, "_idle", {})
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", ModuleType("cuda.bindings"))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
