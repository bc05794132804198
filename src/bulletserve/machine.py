"""Names for what we run on: the device as calibrations call it, and the commit of this very code.

Knows nothing about engines. torch is imported only to ask a GPU for its name.
"""

import os
import platform
import subprocess
from functools import cache
from importlib import import_module
from pathlib import Path

from bulletserve.version import __version__

COMMIT_VARIABLE = "BENCHMARK_COMMIT"
"""Names the commit where the files were copied without their repository, or into another one."""


def device_name(device: str) -> str:
    """The GPU as its driver calls it for "cuda", the processor for "cpu"."""
    if device == "cuda":
        return str(import_module("torch").cuda.get_device_name(0))
    return cpu_name()


@cache
def cpu_name() -> str:
    """The processor's model, or what the system says of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


@cache
def code_commit() -> str:
    """What `COMMIT_VARIABLE` says, else the commit that this file is of, with `-dirty` if the tree differs; the version
    where there is no repository."""
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    here = Path(__file__)
    try:
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return f"bulletserve {__version__}"


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()
