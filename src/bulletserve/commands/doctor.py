"""`bullet doctor`: what this machine offers, and what is missing, in words. The GPU half is `gpu_report`.

Every check is lazy: a package that is not there is a line of the report, never a failure; the exit status is 0.
"""

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from importlib import import_module

from rich.table import Table

from bulletserve.commands.gpu_report import gpu_report, installed
from bulletserve.commands.screen import unbroken_console
from bulletserve.version import __version__

PACKAGES = ("torch", "numpy", "tokenizers", "fastapi", "uvicorn", "msgspec", "pyzmq", "transformers", "openai")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags."""
    del parser


def run(options: argparse.Namespace) -> int:
    """Print the report."""
    del options
    console = unbroken_console()
    table = Table("what", title=f"bullet {__version__}", title_justify="left", show_lines=False)
    table.add_column("here", overflow="fold")
    for what, here in [*_machine(), *_cpu_path(), *_packages(), *_model(), *_calibration()]:
        table.add_row(what, here)
    console.print(table)
    console.print("\n[bold]GPU path[/bold]")
    for line in gpu_report():
        console.print(f"- {line}", soft_wrap=True, markup=False, highlight=False)
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
        yield name, installed(name) or "not installed"


def _model() -> Iterator[tuple[str, str]]:
    from bulletserve.core.errors import BulletError
    from bulletserve.formats.checkpoint import open_checkpoint

    try:
        yield "packaged model", open_checkpoint(None).name
    except BulletError as error:
        yield "packaged model", str(error)


def _calibration() -> Iterator[tuple[str, str]]:
    """What forecasts of the packaged model's steps would go by."""
    what = "calibration for the packaged model"
    try:
        from bulletserve.calibrations import find_calibration
        from bulletserve.formats.checkpoint import open_checkpoint
        from bulletserve.machine import device_name

        torch = import_module("torch")
        if torch.cuda.is_available():
            kind, total_sms = "cuda", int(torch.cuda.get_device_properties(0).multi_processor_count)
            dtype = "bfloat16"
        else:
            kind, total_sms = "cpu", import_module("bulletserve.resources.cpu_threads").usable_cores()
            dtype = str(import_module("bulletserve.engine.load").choose_dtype("auto")).removeprefix("torch.")
        shape = open_checkpoint(None).shape
        yield what, find_calibration(device_name(kind), total_sms, shape, dtype, model="").source
    except Exception as error:  # the other lines still have something to say
        yield what, f"could not be looked for ({type(error).__name__}: {error})"
