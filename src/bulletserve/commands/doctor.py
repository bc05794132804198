"""`bullet doctor`: what this machine offers, and what is missing for the GPU path, in words.

Every check is lazy: a package that is not there is a line of the report, never a failure.
"""

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

from bulletserve.version import __version__

PACKAGES = ("torch", "numpy", "tokenizers", "fastapi", "uvicorn", "msgspec", "pyzmq", "transformers", "openai")
GPU_PACKAGES = {
    "triton": "our own matmul kernels",
    "flashinfer-python": "paged attention",
    "cuda-bindings": "green contexts, the mechanism of SM partitions",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags."""
    del parser


def run(options: argparse.Namespace) -> int:
    """Print the report."""
    del options
    console = Console()
    table = Table("what", "here", title=f"bullet {__version__}", title_justify="left", show_lines=False)
    for what, here in [*_machine(), *_cpu_path(), *_packages(), *_model()]:
        table.add_row(what, here)
    console.print(table)
    console.print("\n[bold]GPU path[/bold]")
    for line in _gpu_path():
        console.print(f"- {line}", soft_wrap=True)
    return 0


def _machine() -> Iterator[tuple[str, str]]:
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cores this process may use", str(cores)


def _cpu_path() -> Iterator[tuple[str, str]]:
    try:
        load = import_module("bulletserve.engine.load")
        threads = import_module("bulletserve.resources.cpu_threads")
    except ImportError as error:
        yield "CPU engine", f"not usable: {error}"
        return
    lattice = threads.cpu_lattice(threads.usable_cores())
    yield "memory available", f"{load.available_bytes() / 2**30:.1f} GiB"
    yield "dtype that --dtype auto takes", str(load.choose_dtype("auto")).removeprefix("torch.")
    splits = ", ".join(f"{p.prefill_sms}+{p.decode_sms}" for p in lattice.splits)
    yield "CPU partitions (prefill + decode threads)", splits


def _packages() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        yield name, _version(name) or "not installed"


def _model() -> Iterator[tuple[str, str]]:
    from bulletserve.core.errors import BulletError
    from bulletserve.formats.checkpoint import open_checkpoint

    try:
        yield "packaged model", open_checkpoint(None).name
    except BulletError as error:
        yield "packaged model", str(error)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu_path() -> Iterator[str]:
    """One line per finding, each with what to do about it."""
    try:
        import torch
    except ImportError:
        yield "torch is not installed: pip install bulletserve"
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield f"torch {torch.__version__} is built for: {build}"
    if not torch.version.cuda:
        yield (
            "to replace it on a machine with an NVIDIA GPU: pip install --force-reinstall --index-url "
            "https://download.pytorch.org/whl/cu130 torch"
        )
    if not torch.cuda.is_available():
        yield "no NVIDIA GPU that torch can use"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield f"GPU {index}: {properties.name}, {properties.multi_processor_count} SMs"
    yield _green_contexts()
    for package, purpose in GPU_PACKAGES.items():
        found = _version(package)
        yield f"{package} {found}" if found else f"{package} is not installed ({purpose})"
    yield "this version of bullet serves on the CPU; --device cuda is refused until the GPU engine is part of it"


def _green_contexts() -> str:
    try:
        driver = import_module("cuda.bindings.driver")
        status, number = driver.cuDriverGetVersion()
    except Exception as error:  # several types, by version and by what is missing
        return f"green contexts: no CUDA driver to ask ({type(error).__name__})"
    if int(status) != 0:
        return f"green contexts: the driver does not answer ({status.name})"
    ready = "supported" if number >= 12040 else "not supported, a driver for CUDA 12.4 or newer is needed"
    return f"green contexts: {ready} (driver for CUDA {number // 1000}.{number % 1000 // 10})"
