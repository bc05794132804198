"""A digest of the code that decides how a run of a policy goes: two runs of equal digests are of the same code.

Knows nothing about git: it works on a copy, and where a commit is the same but the files are not.
"""

import inspect
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

from bulletserve.scheduler.policies import make_policy

_ROOT = Path(__file__).parent
ENGINE = ("core", "engine", "estimator", "kernels", "models", "resources", "scheduler", "telemetry")
"""Folders that decide a run on a device."""

SIMULATOR = ("core", "estimator", "scheduler", "simulator")
"""Those that decide a simulated one."""


@cache
def code_digest(folders: Sequence[str], policy: str, *files: str) -> str:
    """Of the package's folders (other policies' files aside), of the policy's own file, and of more files it reads."""
    own = Path(inspect.getfile(type(make_policy(policy))))
    paths = [
        path
        for folder in folders
        for path in sorted((_ROOT / folder).rglob("*.py"))
        if path.parent.name != "policies" or path.name == "__init__.py"
    ]
    digest = sha256()
    for path in (*paths, own, *map(Path, files)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
