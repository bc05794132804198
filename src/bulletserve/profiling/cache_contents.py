"""Random keys and values for an engine that is measured without prompts of its own.

Zeros in the cache would be faster than real data are (less power, so a higher clock), and unwritten memory may hold
NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

FILL_BLOCKS = 4096


@torch.inference_mode()
def fill_cache(layers: Sequence[Tensor]) -> None:
    """Random keys and values in every block, in place; `layers` as in `engine.kv_cache.KvCache`."""
    for layer in layers:
        for part in layer.split(FILL_BLOCKS):  # type: ignore[no-untyped-call]
            part.normal_()
    if layers[0].is_cuda:
        torch.cuda.synchronize()
