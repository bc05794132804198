"""Words on their way to the device: host buffers that nobody overwrites before they have been read.

Knows nothing about what the words mean. A copy from pinned memory is read by the device some time after it was
queued; a lane builds step n+1 while step n has not begun. So each send uses the next of a few pinned slots, and a
slot is taken again only when its copy is known to be done. The device side is one buffer at one address, which
captured graphs read; it is overwritten in the order of the lane's stream.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SLOTS = 4


class PinnedRing:
    """`words` int32 words on the device, filled from the host in stream order. One thread uses it."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.device_words: Tensor = torch.zeros(words, dtype=torch.int32, device=device)
        self._pinned = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in range(_SLOTS)]
        self._views: list[npt.NDArray[np.int32]] = [pinned.numpy() for pinned in self._pinned]
        self._sent = [torch.cuda.Event() for _ in range(_SLOTS)]  # type: ignore[no-untyped-call]
        self._slot = 0

    def take(self) -> npt.NDArray[np.int32]:
        """The next host buffer, free to write; waits for its last copy if that has not run yet."""
        self._slot = (self._slot + 1) % _SLOTS
        self._sent[self._slot].synchronize()
        return self._views[self._slot]

    def send(self, words: int) -> None:
        """Copy the first `words` of the buffer taken last, on the current stream."""
        self.device_words[:words].copy_(self._pinned[self._slot][:words], non_blocking=True)
        self._sent[self._slot].record()


class TokenReturn:
    """Sampled tokens on their way back: `rows` int32 per step. Written by a lane, read when the step is done.

    A lane has at most two steps that are started and not read, so four slots never meet.
    """

    def __init__(self, rows: int) -> None:
        self._pinned = [torch.zeros(rows, dtype=torch.int32, pin_memory=True) for _ in range(_SLOTS)]
        self._slot = 0

    def fetch(self, tokens: Tensor) -> Tensor:
        """Start copying `tokens` int32 [n] on the current stream; the host tensor they arrive in."""
        self._slot = (self._slot + 1) % _SLOTS
        host = self._pinned[self._slot][: tokens.shape[0]]
        host.copy_(tokens, non_blocking=True)
        return host
