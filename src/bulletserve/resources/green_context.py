"""CUDA green contexts: a GPU's SMs split into two groups, each with a stream whose kernels run on that group alone.

Knows nothing about lanes, partitions or torch. A green context is a set of SMs that the driver provisions; a stream
made in one launches only there, while memory, modules and the current context stay the primary context's own. SMs
come in groups (8 on Hopper, where a cluster needs that many), so what is granted may be more than what was asked.
One split takes about 3 ms and holds 8 MiB; a kernel on such a stream costs nothing extra.

The driver (580, CUDA 13.0) keeps 4 MiB of every green context that was destroyed, and torch keeps cached blocks and
cuBLAS workspaces by stream handle. So a split is never thrown away: `put_back` keeps it for the next `take_split` of
this process.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from bulletserve.core.errors import DeviceError, NoGreenContexts

_NEEDED = ("cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuGreenCtxCreate", "cuGreenCtxStreamCreate")
_FIRST_CUDA = 12050  # the first driver API with cuGreenCtxStreamCreate
_UNSUPPORTED = frozenset(
    {"CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_RESOURCE_TYPE", "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER"}
)
_INSTALL = "pip install 'bulletserve[cuda]'"
_UPDATE = "install an NVIDIA driver for CUDA 12.5 or newer"


@dataclass(frozen=True, slots=True)
class SmPool:
    """The SMs of a device: all of them, the fewest a group may have, and the step by which a group grows."""

    total: int
    smallest: int
    step: int


class Share:
    """`sms` SMs of the device, and the raw handle of a stream (`cudaStream_t`) that runs on them alone."""

    def __init__(self, driver: Any, device: Any, resource: Any, priority: int) -> None:
        self.sms = int(resource.sm.smCount)
        with ExitStack() as undo:
            described = _check("cuDevResourceGenerateDesc", driver.cuDevResourceGenerateDesc([resource], 1))
            flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            context = _check("cuGreenCtxCreate", driver.cuGreenCtxCreate(described, device, flags))
            undo.callback(lambda: _check("cuGreenCtxDestroy", driver.cuGreenCtxDestroy(context)))
            unordered = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            stream = _check("cuGreenCtxStreamCreate", driver.cuGreenCtxStreamCreate(context, unordered, priority))
            undo.callback(lambda: _check("cuStreamDestroy", driver.cuStreamDestroy(stream)))
            self._owned = undo.pop_all()
        self.stream = int(stream)

    def close(self) -> None:
        """Destroy the stream, then its context. Nothing may run on it any more. Raises `DeviceError`."""
        self._owned.close()


class Split:
    """Two groups of SMs that share none: `first` with at least what was asked, `rest` with what is left.

    `asked`: device, SMs of the first, priority of each.
    """

    def __init__(self, device_index: int, first_sms: int, first_priority: int, rest_priority: int) -> None:
        self.asked = (device_index, first_sms, first_priority, rest_priority)
        driver, device, everything = _sm_resource(device_index)
        answer = driver.cuDevSmResourceSplitByCount(1, everything, 0, first_sms)
        groups, made, rest = _check("cuDevSmResourceSplitByCount", answer)
        if made != 1 or rest.sm.smCount == 0:
            total = everything.sm.smCount
            raise DeviceError(f"{first_sms} of {total} SMs cannot be set apart: nothing would be left beside them")
        with ExitStack() as undo:
            self.first = Share(driver, device, groups[0], first_priority)
            undo.callback(self.first.close)
            self.rest = Share(driver, device, rest, rest_priority)
            undo.pop_all()


_idle: dict[tuple[int, int, int, int], list[Split]] = {}


def take_split(device_index: int, first_sms: int, *, first_priority: int, rest_priority: int) -> Split:
    """A split for one owner: one that was put back, or a new one. Lower numbers are higher priorities.

    Raises `NoGreenContexts` where there are none, `DeviceError` if the driver refuses this split.
    """
    idle = _idle.get((device_index, first_sms, first_priority, rest_priority))
    return idle.pop() if idle else Split(device_index, first_sms, first_priority, rest_priority)


def put_back(split: Split) -> None:
    """Keep a split that its owner no longer uses; nothing may run on its streams any more."""
    _idle.setdefault(split.asked, []).append(split)


def sm_pool(device_index: int) -> SmPool:
    """What can be split on a device whose primary context exists. Raises `NoGreenContexts` where nothing can."""
    sm = _sm_resource(device_index)[2].sm
    # cuda-bindings 12 does not hand out the last two; steps of 8 suit every GPU so far.
    return SmPool(sm.smCount, getattr(sm, "minSmPartitionSize", 8), getattr(sm, "smCoscheduledAlignment", 8))


def _sm_resource(device_index: int) -> tuple[Any, Any, Any]:
    """The driver module, the device's handle and all of its SMs."""
    driver = _driver()
    device = _check("cuDeviceGet", driver.cuDeviceGet(device_index))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    return driver, device, _check("cuDeviceGetDevResource", driver.cuDeviceGetDevResource(device, kind))


def _driver() -> Any:
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise NoGreenContexts(f"cuda-bindings cannot be imported ({error}); to fix it: {_INSTALL}") from error
    missing = [name for name in _NEEDED if not hasattr(driver, name)]
    if missing:
        raise NoGreenContexts(f"this cuda-bindings has no {missing[0]}; to fix it: {_INSTALL} --upgrade")
    try:
        version = _check("cuDriverGetVersion", driver.cuDriverGetVersion())
    except RuntimeError as error:
        raise NoGreenContexts(f"no NVIDIA driver can be loaded ({error}); to fix it: {_UPDATE}") from error
    if version < _FIRST_CUDA:
        here = f"{version // 1000}.{version % 1000 // 10}"
        raise NoGreenContexts(f"the NVIDIA driver here is for CUDA {here}; to fix it: {_UPDATE}")
    return driver


def _check(call: str, answer: tuple[Any, ...]) -> Any:
    """What a driver call returned beside its status. Raises `NoGreenContexts` or `DeviceError` for a bad one."""
    status, *values = answer
    if int(status) != 0:
        if status.name in _UNSUPPORTED:
            fix = f"{_UPDATE}; if it is one, this GPU or its mode (MIG, vGPU) has no green contexts"
            raise NoGreenContexts(f"{call} is not supported here ({status.name}); to fix it: {fix}")
        raise DeviceError(f"{call} failed: {status.name} ({int(status)})")
    return values[0] if len(values) == 1 else values
