"""A decoder's operations on a CPU (or, slowly, on anything torch runs on): plain torch and oneDNN.

Knows nothing about layers. Everything of a step comes with its `StepContext`, so any number of lanes may use it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bulletserve.core.shapes import ModelShape
from bulletserve.kernels import matmul
from bulletserve.kernels.attention import (
    decode_attention,
    decode_mask,
    gather_kv,
    page_index,
    prefill_attention,
    slot_index,
    write_kv,
)
from bulletserve.kernels.matmul import Projection
from bulletserve.kernels.norm import rms_norm
from bulletserve.kernels.rope import apply_rope
from bulletserve.models.context import StepContext
from bulletserve.models.rotary import Rotary


class CpuOperators:
    """Operations for one model shape, in `dtype` on `device`."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._rotary = Rotary(shape, dtype, device)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Projection:
        """See `Operators`."""
        return matmul.pack(weight, bias)

    def pack_gated(self, gate: Tensor, up: Tensor) -> Projection:
        """See `Operators`."""
        return matmul.pack(torch.cat((gate, up)))

    def embed(self, ids: Tensor, table: Tensor, context: StepContext | None) -> Tensor:
        """See `Operators`; `ids` int64."""
        return F.embedding(ids, table)

    def logits(self, hidden: Tensor, norm: Tensor, head: Projection, context: StepContext | None) -> Tensor:
        """See `Operators`."""
        return matmul.linear(rms_norm(hidden, norm, self._shape.rms_eps), head).to(torch.float32)

    def begin(self, context: StepContext, kv: Tensor) -> "CpuLayerOperators":
        """Rotary angles, places in the cache and the decode rows' mask."""
        cos, signed_sin = self._rotary.angles(context.positions)
        decode_pages = mask = None
        if (decode := context.decode) is not None:
            decode_pages = page_index(decode.block_tables, decode.max_length, kv)
            mask = decode_mask(decode.lengths, decode.max_length, self._shape.sliding_window, kv)
        prefill_pages = tuple(
            page_index(segment.block_table.unsqueeze(0), segment.context_tokens, kv)
            if segment.context_tokens > segment.stop - segment.start
            else None
            for segment in context.prefill
        )
        slots = slot_index(context.kv_slots, kv)
        return CpuLayerOperators(self._shape, context, cos, signed_sin, slots, prefill_pages, decode_pages, mask)


@dataclass(frozen=True, slots=True)
class CpuLayerOperators:
    """What all layers of a step share. A prefill segment without earlier context reads no pages."""

    shape: ModelShape
    context: StepContext
    cos: Tensor
    signed_sin: Tensor
    slots: Tensor
    prefill_pages: tuple[Tensor | None, ...]
    decode_pages: Tensor | None
    decode_mask: Tensor | None

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `LayerOperators`."""
        return rms_norm(x, weight, self.shape.rms_eps)

    def linear(self, x: Tensor, projection: Projection) -> Tensor:
        """See `LayerOperators`."""
        return matmul.linear(x, projection)

    def linear_add(self, x: Tensor, projection: Projection, residual: Tensor) -> Tensor:
        """See `LayerOperators`."""
        return matmul.linear_add(x, projection, residual)

    def gated(self, x: Tensor, projection: Projection) -> Tensor:
        """See `LayerOperators`."""
        return matmul.gated_silu(matmul.linear(x, projection))

    def attend(self, qkv: Tensor, qk_norm: Tensor | None, kv: Tensor) -> Tensor:
        """See `LayerOperators`."""
        shape = self.shape
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        q, new_kv = heads[:, : shape.num_heads], heads[:, shape.num_heads :]
        turning = heads[:, : shape.num_heads + shape.num_kv_heads]
        if qk_norm is not None:
            turning.copy_(rms_norm(turning, qk_norm, shape.rms_eps))
        apply_rope(turning, self.cos, self.signed_sin)
        write_kv(kv, new_kv, self.slots)
        outputs = []
        for segment, pages in zip(self.context.prefill, self.prefill_pages, strict=True):
            rows = slice(segment.start, segment.stop)
            if pages is None:
                k, v = new_kv[rows].transpose(0, 1).chunk(2)
            else:
                k, v = (side[:, : segment.context_tokens] for side in gather_kv(kv, pages, 1))
            outputs.append(prefill_attention(q[rows], k, v, shape.sliding_window))
        if (decode := self.context.decode) is not None:
            assert self.decode_pages is not None and self.decode_mask is not None
            k, v = gather_kv(kv, self.decode_pages, decode.stop - decode.start)
            outputs.append(decode_attention(q[decode.start : decode.stop], k, v, self.decode_mask))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
