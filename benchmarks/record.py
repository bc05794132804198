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
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("bulletserve", "torch", "transformers", "numpy")


def record(name: str, metrics: Mapping[str, float], *, folder: Path = RESULTS) -> Path:
    """Writes `folder`/`name`.json, replacing an older one, and returns its path."""
    document = {
        "name": name,
        "command": shlex.join(["python", *sys.argv]),
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


def hardware() -> dict[str, str | int]:
    """The CPU, its cores, the load on it now and, where there is one, the GPU."""
    found: dict[str, str | int] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "load_average_1min": f"{os.getloadavg()[0]:.2f}",
    }
    import torch

    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpus"] = torch.cuda.device_count()
    return found


def versions() -> dict[str, str]:
    """Python's and those of the packages that decide speed, where installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit that is checked out, with `-dirty` if the tree differs from it; `unknown` outside of git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
