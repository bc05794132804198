"""Writes what a benchmark found as one JSON document into benchmarks/new, which git ignores.

No run changes a document of benchmarks/results, to which pages refer: who wants to keep a new one moves it there.
Every figure carries what is needed to repeat or doubt it: the command, the hardware, the versions, the commit.
Metric keys end in their unit (`_ms`, `_tok_s`) or in `_x` for a ratio.
"""

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from bulletserve.machine import code_commit, cpu_name

NEW = Path(__file__).parent / "new"

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


def record(name: str, metrics: Mapping[str, float], *, folder: Path = NEW) -> Path:
    """Writes `folder`/`name`.json, replacing an older one, and returns its path."""
    document = {
        "name": name,
        "command": command(),
        "hardware": hardware(),
        "versions": versions(),
        "commit": code_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "metrics": {key: round(value, 4) for key, value in metrics.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def tell(name: str, metrics: Mapping[str, float]) -> None:
    """Print each figure on a line of its own, `record` all, and print where they are."""
    width = max(map(len, metrics), default=0)
    for key, value in metrics.items():
        print(f"{key:{width}} {value:12.3f}")
    print("written:", record(name, metrics))


def command() -> str:
    """How this process was started."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    script = sys.argv[:1] if spec is None else ["-m", spec.name]
    return shlex.join(["python", *script, *sys.argv[1:]])


def hardware() -> dict[str, str | int]:
    """The CPU, its cores, the load on it now and, where there is one, the GPU."""
    found: dict[str, str | int] = {
        "cpu": cpu_name(),
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
