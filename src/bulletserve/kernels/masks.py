"""Masks of allowed tokens, laid on logits before one is drawn.

Knows nothing about where they come from. A mask is one bit per token in little-endian 32-bit words; it may be longer
than the vocabulary, whose tokens alone count.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def keep_allowed(logits: Tensor, seats: Tensor, masks: Mapping[int, bytes]) -> None:
    """Set what `masks[seat]` does not allow to -inf in `logits` [R, V], in place; row r belongs to `seats` int64 [R].

    Rows whose seat has no mask stay as they are.
    """
    for row, seat in enumerate(seats.tolist()):
        mask = masks.get(seat)
        if mask is not None:
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=logits.shape[1], bitorder="little")
            logits[row].masked_fill_(torch.from_numpy(bits == 0), float("-inf"))
