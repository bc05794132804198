"""Token ids to rows of the embedding table, on the GPU.

Knows nothing about the tokenizer. A gather, bound by memory.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _embed(ids, table, out, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    token = tl.load(ids + row).to(tl.int64)
    values = tl.load(table + token * width + column, (column < width) & (token >= 0), 0.0)
    tl.store(out + row * width + column, values, column < width)


def embed(ids: Tensor, table: Tensor, out: Tensor) -> None:
    """`out` [T, H] = the rows `ids` int32 [T] of `table` [V, H]; a negative id is padding and gives zeros."""
    rows, width = out.shape
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _embed[(rows, triton.cdiv(width, block))](ids, table, out, width, block, num_warps=max(1, block // 512))
