"""Bullet: LLM serving with prefill and decode side by side on one device.

Importing the package is cheap and imports no torch; the public names load what they need on first use. It settles how
OpenMP waits, which has to happen before anything of ours loads torch: by default a thread of a team spins for
milliseconds at the end of each operation, and as soon as anything else wants a core (our own HTTP front, a client) a
step on all cores takes ten to fifty times as long. A short spin costs a few percent on an idle machine and keeps a busy
one usable (docs/LOG.md, 2026-11-29). The environment's own setting wins.
"""

import os
from typing import TYPE_CHECKING

from bulletserve.version import __version__

if TYPE_CHECKING:
    from bulletserve.core.request import SamplingParams as SamplingParams
    from bulletserve.llm import LLM as LLM

SPIN_COUNT = "2000"

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from bulletserve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from bulletserve.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
