"""Stand-ins for what only CUDA has: pinned rings that copy at once, graphs that do their work when replayed."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bulletserve.engine.cuda.cuda_graphs import GraphKey


class PlainRing:
    """`PinnedRing` in plain memory. What was not sent is poisoned, so that no step reads another's words."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.device_words = torch.zeros(words, dtype=torch.int32, device=device)
        self._host = np.zeros(words, dtype=np.int32)

    def take(self):
        self._host[:] = -123456
        return self._host

    def send(self, words: int) -> None:
        self.device_words[:words] = torch.from_numpy(self._host[:words].copy())


class PlainReturn:
    """`TokenReturn` in plain memory."""

    def __init__(self, rows: int) -> None:
        pass

    def fetch(self, tokens: Tensor) -> Tensor:
        return tokens.clone()


class WorkGraph:
    """A captured step that is done anew at each replay, with whatever its inputs hold then."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class WorkGraphs(dict[GraphKey, WorkGraph]):
    """`StepGraphs` without capturing."""
