"""The memory of keys and values: fixed blocks of tokens, one tensor per layer.

Knows nothing about who owns a block (`scheduler/kv_ledger`) or what is in it. The layout is that of
`kernels/attention`: [blocks, 2, kv_heads, block_size, head_dim].
"""

import torch
from torch import Tensor

from bulletserve.core.shapes import ModelShape


def bytes_per_block(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block of `block_size` tokens takes over all layers."""
    return shape.kv_elements_per_token * block_size * dtype.itemsize


class KvCache:
    """`num_blocks` blocks of `block_size` tokens for every layer of `shape`.

    `layers[i]` is [num_blocks, 2, kv_heads, block_size, head_dim]. It starts as zeros, because attention needs
    finite numbers at places not written yet. Writing them up front is worth it: pages that are first touched under
    traffic made every step about 8 % slower (docs/LOG.md).
    """

    def __init__(
        self, shape: ModelShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_block = bytes_per_block(shape, block_size, dtype)
        size = (num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim)
        self.layers: list[Tensor] = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]
