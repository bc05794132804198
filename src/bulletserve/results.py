"""A result as one JSON document: the figures, and what is needed to repeat or to doubt them.

Knows nothing about what was measured. Metric keys end in their unit (`_ms`, `_req_s`) or in `_x` for a ratio.
"""

import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any

from bulletserve.cache_files import write_whole
from bulletserve.machine import code_commit, cpu_name
from bulletserve.version import __version__

ENGINE_PACKAGES = ("torch", "triton", "flashinfer-python", "cuda-bindings")
"""Those that decide how fast a step is."""


def write_result(
    path: Path, name: str, metrics: Mapping[str, float], hardware: Mapping[str, str | int], **more: Any
) -> None:
    """Write the document to `path` in one step. `hardware` beside the processor; `more`: other plain values.

    Metrics that are not finite are left out: JSON has no word for them.
    """
    document = {
        "name": name,
        "command": shlex.join(["bullet", *sys.argv[1:]]),
        "hardware": {"cpu": cpu_name()} | dict(hardware),
        "versions": _versions(),
        "commit": code_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **more,
        "metrics": {key: round(value, 6) for key, value in metrics.items() if isfinite(value)},
    }
    write_whole(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def _versions() -> dict[str, str]:
    plain = ("numpy", "scipy", "matplotlib", *ENGINE_PACKAGES)
    return {"python": platform.python_version(), "bulletserve": __version__} | versions_of(plain)


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Those of them that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
