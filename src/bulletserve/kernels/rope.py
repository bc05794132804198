"""Rotary position embedding in the half-split layout of Hugging Face checkpoints.

Knows nothing about frequencies or scaling: `models/rotary` makes the angles. Dimension i of a head turns with
dimension i + D/2.
"""

from torch import Tensor


def apply_rope(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """Rotates `heads` [T, N, D] in place.

    `cos` and `signed_sin` are [T, 1, D] in heads' dtype, the two halves of D equal but for the sign: the first
    half of `signed_sin` is negative.
    """
    tokens, count, head_dim = heads.shape
    turned = heads.view(tokens, count, 2, head_dim // 2).flip(2).view(heads.shape)
    heads.mul_(cos).addcmul_(turned, signed_sin)
