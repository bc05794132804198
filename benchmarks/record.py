"""Writes what a benchmark found as one JSON document beside the others in benchmarks/results/.

Every figure carries what is needed to repeat or doubt it: the command, the hardware, the versions, the commit.
Metric keys end in their unit (`_ms`, `_tok_s`) or in `_x` for a ratio.
"""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
COMMIT_VARIABLE = "BENCHMARK_COMMIT"
"""Names the commit where the files were copied without their repository."""

_PACKAGES = (
    "bulletserve",
    "torch",
    "transformers",
    "numpy",
    "triton",
    "flashinfer-python",
    "flashinfer-cubin",
    "cuda-bindings",
)


def record(name: str, metrics: Mapping[str, float], *, folder: Path = RESULTS) -> Path:
    """Writes `folder`/`name`.json, replacing an older one, and returns its path."""
    document = {
        "name": name,
        "command": command(),
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "metrics": {key: round(value, 4) for key, value in metrics.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def command() -> str:
    """How this process was started."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    script = sys.argv[:1] if spec is None else ["-m", spec.name]
    return shlex.join(["python", *script, *sys.argv[1:]])


def hardware() -> dict[str, str | int]:
    """The CPU, its cores, the load on it now and, where there is one, the GPU."""
    found: dict[str, str | int] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "load_average_1min": f"{os.getloadavg()[0]:.2f}",
    }
    return found | _gpu()


@cache
def _gpu() -> dict[str, str | int]:
    import torch

    if not torch.cuda.is_available():
        return {}
    from bulletserve.commands.gpu_report import driver_version

    card = torch.cuda.get_device_properties(0)
    return {
        "gpu": card.name,
        "gpus": torch.cuda.device_count(),
        "gpu_sms": card.multi_processor_count,
        "gpu_memory_gib": round(card.total_memory / 2**30),
        "gpu_driver": driver_version() or "unknown",
        "cuda": torch.version.cuda or "unknown",
    }


@cache
def versions() -> dict[str, str]:
    """Python's and those of the packages that decide speed, where installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def commit() -> str:
    """The commit that is checked out, with `-dirty` if the tree differs from it.

    Outside of git what `COMMIT_VARIABLE` says, else `unknown`.
    """
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get(COMMIT_VARIABLE, "unknown")
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
