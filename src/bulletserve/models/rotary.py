"""Rotary angles: position x inverse frequency, with the stretchings of long-context checkpoints.

Knows nothing about attention. The angles of a step are computed in float32 from its positions, once for all
layers: a few microseconds, where a table over the full context would take up to 100 MB.
"""

import math

import torch
from torch import Tensor

from bulletserve.core.errors import UnsupportedModel
from bulletserve.core.shapes import ModelShape


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """Float32 [head_dim / 2], in radians per token.

    Raises UnsupportedModel for a rope scaling that we do not know.
    """
    dim, scaling = shape.head_dim, shape.rope_scaling
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    frequencies = 1.0 / (shape.rope_theta**exponents)
    if scaling.kind == "default":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind != "llama3":
        raise UnsupportedModel(f"rope scaling {scaling.kind!r} is not supported; use default, linear or llama3")
    # Llama 3.1: long wavelengths are stretched, short ones kept, those between blended.
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_context / wavelengths
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


class Rotary:
    """Makes the cosines and sines of a step."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        frequencies = inverse_frequencies(shape)
        # Over all of head_dim, the first half negative: cos is even and sin odd, so one table serves both.
        self._frequencies = torch.cat((-frequencies, frequencies)).to(device)
        self._dtype = dtype

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, signed sin) for `positions` int64 [T]: each [T, 1, head_dim], as `kernels/rope` takes them."""
        turns = (positions.unsqueeze(1) * self._frequencies).unsqueeze(1)
        return turns.cos().to(self._dtype), turns.sin().to(self._dtype)
