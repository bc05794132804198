"""SwiGLU's product on the GPU: silu(gate) * up.

Knows nothing about the projections around it. Bound by memory: two reads and one write an element. Gate and up come in
turns of eight columns, as a gated weight's product has them (`matmul`): 16 bytes each.
"""

import triton
import triton.language as tl
from torch import Tensor

TURN = 8
_BLOCK = 1024
_WIDE_BLOCK = 4096


@triton.jit
def _silu_mul(gate_up, out, width: tl.constexpr, block: tl.constexpr, turn: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < width
    source = gate_up + row * 2 * width + (column // turn) * (2 * turn) + column % turn
    gate = tl.load(source, mask, 0.0)
    up = tl.load(source + turn, mask, 0.0)
    wide = gate.to(tl.float32)
    # As in transformers the activation is rounded before the product.
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * width + column, (active.to(tl.float32) * up.to(tl.float32)).to(out.dtype.element_ty), mask)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """`out` [T, I] = silu(gate) * up of `gate_up` [T, I / 8, 2, 8], gate first; both contiguous, silu in float32."""
    rows, width = out.shape
    if rows:
        block = _BLOCK if rows < 64 else _WIDE_BLOCK
        _silu_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, block, TURN, num_warps=block // 256)
