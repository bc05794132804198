"""A workload as people name it: a list of requests, a published trace, or one that is built in.

Knows nothing about rates or targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bulletserve.core.errors import ConfigError
from bulletserve.workload.recipe import QUANTILES, long_context, read_trace, sample, synthetic
from bulletserve.workload.request_list import RequestLengths, read_request_list

BUILT_IN = (*QUANTILES, "long-context")


@dataclass(frozen=True)
class Workload:
    """Requests that arrive one a second in the mean. `origin`: where they come from, in words."""

    name: str
    requests: Sequence[RequestLengths]
    origin: str


def open_workload(text: str) -> Workload:
    """A `.jsonl` list, a `.csv` trace (made into a list by `recipe`), or a name of `BUILT_IN`.

    Raises `ConfigError` for what is none of them.
    """
    path = Path(text)
    if path.suffix == ".csv":
        return Workload(path.stem, sample(read_trace(path)), f"600 requests drawn from {path}")
    if path.suffix == ".jsonl" or path.exists():
        requests = read_request_list(path)
        if not requests:
            raise ConfigError(f"{path} holds no requests")
        return Workload(path.stem, requests, str(path))
    if text == "long-context":
        return Workload(text, long_context(), "built in, synthetic")
    if text in QUANTILES:
        return Workload(
            text, synthetic(text), "built in, synthetic: lengths after the quantiles of the published trace"
        )
    raise ConfigError(f"no workload {text!r}: name a .jsonl list, a .csv trace, or one of {', '.join(BUILT_IN)}")
