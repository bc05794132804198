"""Bullet: LLM serving with prefill and decode side by side on one device.

Importing the package is cheap and imports no torch; the public names load what they need on first use.
"""

from typing import TYPE_CHECKING

from bulletserve.version import __version__

if TYPE_CHECKING:
    from bulletserve.core.request import SamplingParams as SamplingParams
    from bulletserve.llm import LLM as LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from bulletserve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from bulletserve.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
