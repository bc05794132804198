"""Projections: y = x W^T (+ bias, + residual), with weights laid out once for the hardware.

Knows nothing about which projection of which model it computes. A decode step reads every weight once for a
few rows, so its time is that of streaming the weights; on a CPU a plain row-major matrix is re-ordered into
the layout of the vector units at every call, which costs more than the product itself. `pack` does that once.
Measured on Zen 4 with SmolLM2's matrices: 1.5-2.5x at 1 to 16 rows, 1.0-1.15x at 512 (docs/LOG.md).

A packed weight is read-only, so any number of lanes may use it at once.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_HINT = 512  # the layout chosen for many rows is as good for few; one chosen for 1 row is poor for 4 to 16


@dataclass(frozen=True, slots=True)
class Projection:
    """A weight ready for use: [out_features, in_features] as `pack` got it, in a layout of the library's own.

    `bias` is [out_features] or None; `packed` says whether `weight` is opaque.
    """

    weight: Tensor
    bias: Tensor | None
    packed: bool


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has a prepacked product for this dtype on this machine."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack(weight: Tensor, bias: Tensor | None = None) -> Projection:
    """Lays out `weight` [out, in] for `linear`; the source tensor is not kept if it was packed."""
    if not can_pack(weight.dtype, weight.device):
        return Projection(weight.contiguous(), bias, packed=False)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    return Projection(packed, bias, packed=True)


def linear(x: Tensor, projection: Projection) -> Tensor:
    """x [T, in] -> [T, out] in x's dtype, accumulated in float32."""
    if projection.packed:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, projection.weight, projection.bias, "none", [], "")
        return y
    return F.linear(x, projection.weight, projection.bias)


def linear_add(x: Tensor, projection: Projection, residual: Tensor) -> Tensor:
    """`residual` [T, out] + linear(x); on a CPU the sum is part of the product. Changes neither argument."""
    if projection.packed:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, projection.weight, projection.bias, "add")
        return y
    return F.linear(x, projection.weight, projection.bias).add_(residual)


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `gate_up` [T, 2 * I], gate first -> [T, I]. Overwrites its argument's gate half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
