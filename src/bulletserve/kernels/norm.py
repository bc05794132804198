"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight, statistics in float32.

Knows nothing about where in a model it stands. With few rows it is bound by launches, with many by passes over
the data: torch's `rms_norm` has no CPU kernel of its own and makes three passes more than this one.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises the last dimension of `x` [..., D]; `weight` broadcasts to x. Returns x's shape and dtype.

    As in transformers, the normalised row is rounded to x's dtype before it meets the weight.
    """
    wide = x.to(torch.float32)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.new_full((), eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    normalised = wide * scale if wide is x else wide.mul_(scale).to(x.dtype)
    return normalised.mul_(weight)
