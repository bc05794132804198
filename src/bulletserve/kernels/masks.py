"""Masks of allowed tokens, laid on logits before one is drawn.

Knows nothing about where they come from. A mask is one bit per token in little-endian 32-bit words; it may be longer or
shorter than a row of logits: tokens beyond its end are not allowed. Plain torch for both devices, because rows with
masks are few; nothing here reads a device's numbers on the host, so nothing waits for the device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_WORD_BITS = 32


def keep_allowed(logits: Tensor, at: Sequence[int], masks: Sequence[bytes]) -> Tensor:
    """Set what `masks[i]` does not allow to -inf in row `at[i]` of `logits` [R, V], in place; a copy of these rows."""
    rows = to_device(np.array(at, dtype=np.int64), logits.device)
    kept = logits[rows].masked_fill_(_banned(masks, logits.shape[1], logits.device), float("-inf"))
    logits.index_copy_(0, rows, kept)
    return kept


def to_device(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], device: torch.device) -> Tensor:
    """A host array on the device, without waiting for what is queued there."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _banned(masks: Sequence[bytes], width: int, device: torch.device) -> Tensor:
    """Whether each of `width` tokens is missing in each mask, bool [masks, width]."""
    words = np.zeros((len(masks), -(-width // _WORD_BITS)), dtype=np.int32)
    for row, mask in zip(words, masks, strict=True):
        given = np.frombuffer(mask, dtype="<i4")[: len(row)]
        row[: len(given)] = given
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=device)
    allowed = (to_device(words, device).unsqueeze(2) >> bits) & 1
    return allowed.view(len(masks), -1)[:, :width] == 0
