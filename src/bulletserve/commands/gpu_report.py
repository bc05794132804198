"""The GPU half of `bullet doctor`: card, driver, packages, partitions, compiled kernels, one line per finding.

Knows nothing about printing. Every section is on its own: what fails in one is a line of the report, and a machine
without a GPU, without torch or with a broken driver gets a report all the same.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

from bulletserve.core.config import CUDA_TORCH

OLDEST_DRIVER = 580  # of CUDA 13

GPU_PACKAGES = {
    "triton": "our own kernels, the GPU engine cannot run without it",
    "flashinfer-python": "fast prefill attention, without it our own kernel is used",
    "cuda-bindings": "green contexts, without it both lanes share all SMs",
    "nvidia-ml-py": "power and clock, without it bullet calibrate knows nothing of the power cap",
}
INSTALL = "pip install 'bulletserve[cuda]'"

_NOT_YET = "not made yet (the first start takes minutes longer)"

_PROC = Path("/proc/driver/nvidia/version")
_TOOLKIT = Path("/usr/local/cuda")


def gpu_report() -> Iterator[str]:
    """All findings, each with what to do about it. Never raises."""
    sections: tuple[tuple[str, Callable[[], Iterator[str]]], ...] = (
        ("driver", _driver),
        ("torch", _torch),
        ("GPU", _cards),
        ("packages", _packages),
        ("partitions", _partitions),
        ("compiled kernels", _kernels),
    )
    for name, section in sections:
        try:
            yield from section()
        except Exception as error:  # whatever it is: the other sections still have something to say
            yield f"{name}: could not be looked at ({type(error).__name__}: {error})"


def driver_version() -> str | None:
    """The NVIDIA driver's version, None where no driver is loaded (and so no GPU can be used)."""
    if _PROC.exists() and (found := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _PROC.read_text())):
        return found.group()
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else None


def installed(package: str) -> str | None:
    """The version of a distribution, None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> Iterator[str]:
    found = driver_version()
    if found is None:
        yield "no NVIDIA driver is loaded: bullet serves on the CPU here"
    elif int(found.split(".")[0]) < OLDEST_DRIVER:
        yield f"NVIDIA driver {found}: torch's CUDA 13 build needs {OLDEST_DRIVER} or newer, update the driver"
    else:
        yield f"NVIDIA driver {found}"


def _torch() -> Iterator[str]:
    try:
        torch = import_module("torch")
    except ImportError:
        yield f"torch is not installed: {INSTALL}"
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    yield f"torch {torch.__version__} is built for {build}"
    if torch.version.cuda and torch.cuda.is_available():
        return
    if torch.version.cuda:
        yield "torch finds no GPU: nvidia-smi must list one (in a container: docker run --gpus all)"
    elif driver_version() is not None:
        yield (
            f"an NVIDIA driver is here, but this torch cannot use it; the line that replaces it: {sys.executable} -m "
            f"{CUDA_TORCH}"
        )


def _cards() -> Iterator[str]:
    torch = import_module("torch")
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        yield (
            f"GPU {index}: {card.name}, {card.multi_processor_count} SMs, compute capability "
            f"{card.major}.{card.minor}, {free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free"
        )


def _packages() -> Iterator[str]:
    fix = "only a GPU needs it" if driver_version() is None else INSTALL
    for package, purpose in GPU_PACKAGES.items():
        found = installed(package)
        yield f"{package} {found}" if found else f"{package} is not installed ({purpose}): {fix}"
    if not _has_gpu():
        return
    if installed("flashinfer-python") and not _nvcc():
        yield (
            "no nvcc: FlashInfer compiles its kernels with it when they are first used; install the CUDA toolkit or "
            "set CUDA_HOME"
        )
    if shutil.which(os.environ.get("CC", "cc")) is None and shutil.which("gcc") is None:
        yield "no C compiler: Triton needs one when a kernel is first launched; install gcc"


def _partitions() -> Iterator[str]:
    """Each partition of each GPU, and on which SMs its streams' kernels really ran."""
    if not _has_gpu():
        return
    make_manager = import_module("bulletserve.resources.manager").PartitionManager
    probe = import_module("bulletserve.resources.probe").probe
    for index in range(import_module("torch").cuda.device_count()):
        manager = make_manager(index)
        try:
            yield f"GPU {index}, partitions: {manager.describe().splitlines()[0]}"
            for partition, results in groupby(probe(manager), key=lambda result: result.partition):
                lanes = list(results)
                seen = ", ".join(f"{one.lane.name.lower()} on {len(one.sms_seen)} SMs" for one in lanes)
                graphs = "" if all(one.graph_keeps_sms for one in lanes) else "; a CUDA graph does not keep its SMs"
                verdict = "as granted" if all(one.ok for one in lanes) else "NOT as granted"
                asked = f"{partition.prefill_sms} + {partition.decode_sms}"
                yield f"GPU {index}, {asked}: kernels ran {seen}: {verdict}{graphs}"
        finally:
            manager.close()


def _kernels() -> Iterator[str]:
    """What the first start left behind, so that the next is quick."""
    if not _has_gpu():
        return
    folders = {
        "Triton's kernels": Path(os.environ.get("TRITON_CACHE_DIR") or _home("TRITON_HOME") / ".triton" / "cache"),
        "FlashInfer's kernels": _home("FLASHINFER_WORKSPACE_BASE") / ".cache" / "flashinfer",
    }
    for what, path in folders.items():
        yield f"{what}: {path}" + ("" if path.exists() else f", {_NOT_YET}")
    choice = import_module("bulletserve.kernels.cuda.matmul_choice")
    folder = choice.default_path(choice.TableKey.of("any GPU", 0, "any dtype")).parent
    tables = len(list(folder.glob("matmul-*.json")))
    yield f"tables of tuned matmuls: {folder}, " + (f"{tables} there" if tables else _NOT_YET)


def _home(variable: str) -> Path:
    return Path(os.environ.get(variable) or Path.home())


def _has_gpu() -> bool:
    return bool(import_module("torch").cuda.is_available())


def _nvcc() -> bool:
    home = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or _TOOLKIT)
    return shutil.which("nvcc") is not None or (home / "bin" / "nvcc").exists()
