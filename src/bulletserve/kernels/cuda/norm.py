"""RMSNorm on the GPU. The addition before it is part of the product that makes the addend.

Knows nothing about where in a model it stands. Bound by memory: a row is read once, stays in registers between
the statistics and the product, and is written once; one program per row.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def normalised(x, weight, width: tl.constexpr, eps, dtype: tl.constexpr):
    """x float32 [..., D] over its last dimension -> `dtype`, rounded before it meets the weight, as transformers do."""
    scale = tl.rsqrt(tl.sum(x * x, axis=-1, keep_dims=True) / width + eps)
    rounded = (x * scale).to(dtype)
    return (rounded.to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def _rms_norm(x, weight, out, eps, width: tl.constexpr, block: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, block)
    mask = column < width
    values = tl.load(x + start + column, mask, 0.0).to(tl.float32)
    scales = tl.load(weight + column, mask, 0.0)
    tl.store(out + start + column, normalised(values, scales, width, eps, out.dtype.element_ty), mask)


def _shape(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"width": width, "block": block, "num_warps": min(16, max(1, block // 512))}


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """`out` = x / sqrt(mean(x^2) + eps) * weight along rows. x and out [T, D] contiguous, weight [D], D <= 16384."""
    if x.shape[0]:
        _rms_norm[(x.shape[0],)](x, weight, out, eps, **_shape(x.shape[1]))
