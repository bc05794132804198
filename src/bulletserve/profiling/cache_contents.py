"""Random keys and values for an engine that is measured without prompts of its own.

Zeros in the cache would be faster than real data are (less power, so a higher clock), and unwritten memory may hold
NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PATTERN_BLOCKS = 256
"""So many blocks are drawn, the rest are copies: drawing a gigabyte takes a core many seconds."""


@torch.inference_mode()
def fill_cache(layers: Sequence[Tensor]) -> None:
    """Random keys and values in every block, in place; `layers` as in `engine.kv_cache.KvCache`."""
    for layer in layers:
        pattern = layer[:PATTERN_BLOCKS].normal_()
        for part in layer[PATTERN_BLOCKS:].split(PATTERN_BLOCKS):  # type: ignore[no-untyped-call]
            part.copy_(pattern[: len(part)])
    if layers[0].is_cuda:
        torch.cuda.synchronize()
