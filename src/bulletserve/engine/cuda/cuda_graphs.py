"""Captured steps: one CUDA graph per (kind of step, bucket, share of SMs).

Knows nothing about what is captured. A graph keeps the SMs of the stream it was captured on, so it is captured on the
very stream that will replay it. The graphs of one lane share a memory pool: they never run at once, those of two lanes
do. After `seal` nothing is captured any more: a step without a graph runs eagerly.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from bulletserve.core.errors import EngineError


class GraphKey(NamedTuple):
    """What a graph holds: a kind of step for `size` rows on `sms` SMs, all of it or one `layer`."""

    kind: str
    size: int
    sms: int
    layer: int = -1


class StepGraphs:
    """The graphs of one lane."""

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._sealed = False

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, key: GraphKey, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """Record `work` on `stream`; every kernel in it must have run before, and nothing else may run meanwhile.

        torch's own context manager collects garbage and empties its cache each time: 25 ms, for thousands of graphs.
        """
        if self._sealed:
            raise EngineError(f"a graph was to be captured under traffic: {key}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        self._graphs[key] = graph

    def seal(self) -> None:
        """From now on, only replays."""
        self._sealed = True

    def get(self, key: GraphKey) -> torch.cuda.CUDAGraph | None:
        """The graph of a step, if it was captured."""
        return self._graphs.get(key)


class CapturedSteps(Protocol):
    """Steps of one lane that can be captured."""

    layers: int
    graphs: StepGraphs

    def captures(self) -> Iterator[GraphKey]:
        """Every graph that is wanted, largest first: the smaller ones then fit into its memory."""

    def work(self, key: GraphKey, layers: int) -> None:
        """What one graph holds, with its first `layers` layers, on the current stream, as it is captured."""

    def warm_rules(self, sms: int) -> None:
        """Compile and load what rows with rules need beside the graphs, on the current stream."""

    def warm_masks(self, sms: int) -> None:
        """Compile and load what rows with masks need beside the graphs, on the current stream."""
