"""A decoder's operations on an NVIDIA GPU: our kernels, each told how many SMs its step has.

Knows nothing about layers, graphs or lanes' order. Results lie in the lane's workspace, which holds each kind of
activation once: nothing is allocated while a step runs, so a captured graph and an eager step use the same addresses
and a batch may go on in another stream. Everything of a step comes with its `CudaStepContext`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bulletserve.core.shapes import ModelShape
from bulletserve.kernels.cuda.embedding import embed
from bulletserve.kernels.cuda.matmul import MatmulScratch, Weight, gated_weight, matmul
from bulletserve.kernels.cuda.matmul_choice import ChoiceTable
from bulletserve.kernels.cuda.norm import rms_norm
from bulletserve.kernels.cuda.rope import rope_table, rope_write
from bulletserve.kernels.cuda.sampling import SamplingScratch
from bulletserve.models.rotary import inverse_frequencies


def padded(features: int) -> int:
    """The nearest width that matrix products take: rows of 16 bytes."""
    return -(-features // 8) * 8


class AttentionPart(Protocol):
    """The attention of some rows of a batch, planned for one step."""

    def run(self, qkv: Tensor, q: Tensor, kv: Tensor, out: Tensor) -> None:
        """From `q` [T, heads, head_dim] and a layer's cache into the part's own rows of `out` [T, heads * head_dim].

        `q` is a view of the packed rows `qkv`, q and k turned; `kv` holds their k and v too.
        """


class LaneWorkspace:
    """Activations and scratch of one lane: steps of up to `max_tokens` rows, logits of up to `max_rows`."""

    def __init__(
        self,
        shape: ModelShape,
        max_tokens: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        max_sms: int,
    ) -> None:
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

        def rows(width: int) -> Tensor:
            return torch.zeros((max_tokens, width), dtype=dtype, device=device)

        self.hidden = rows(shape.hidden_size)
        self.normed = rows(shape.hidden_size)
        self.qkv = rows(heads + 2 * kv_heads)
        self.attended = rows(heads)
        self.gate_up = rows(2 * shape.intermediate_size)
        self.active = rows(shape.intermediate_size)
        self.sampled = torch.zeros((max_rows, shape.hidden_size), dtype=dtype, device=device)
        self.logits = torch.zeros((max_rows, padded(shape.vocab_size)), dtype=torch.float32, device=device)
        self.matmul = MatmulScratch(device, max_sms)
        self.sampling = SamplingScratch.allocate(max_rows, self.logits.shape[1], device)


@dataclass(frozen=True, slots=True)
class CudaStepContext:
    """One step of T rows on `sms` SMs. `capturing`: it is being recorded in a graph.

    `positions` int32 [T]; `slots` int64 [T], block * block_size + offset, negative for padding.
    """

    sms: int
    capturing: bool
    workspace: LaneWorkspace
    positions: Tensor
    slots: Tensor
    attention: Sequence[AttentionPart] = ()


class CudaOperators:
    """Operations for one model shape with contexts of at most `max_positions` tokens.

    `choices` says which matrix product runs where; it may be exchanged once the packed weights have been tuned.
    """

    def __init__(self, shape: ModelShape, max_positions: int, choices: ChoiceTable, device: torch.device) -> None:
        self.shape = shape
        self.choices = choices
        self.rope = rope_table(inverse_frequencies(shape), max_positions).to(device)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Weight:
        """See `Operators`. Rows of zeros follow where the product wants more: only a vocabulary is an odd number."""
        missing = padded(weight.shape[0]) - weight.shape[0]
        if missing:
            weight = F.pad(weight, (0, 0, 0, missing))
        return Weight(weight.contiguous(), bias)

    def pack_gated(self, gate: Tensor, up: Tensor) -> Weight:
        """See `Operators`."""
        return gated_weight(gate, up)

    def embed(self, ids: Tensor, table: Tensor, context: CudaStepContext) -> Tensor:
        """See `Operators`; `ids` int32, negative for padding. The result is the workspace's residual stream."""
        hidden = context.workspace.hidden[: ids.shape[0]]
        embed(ids, table, hidden)
        return hidden

    def begin(self, context: CudaStepContext, kv: Tensor) -> "CudaLayerOperators":
        """See `Operators`."""
        return CudaLayerOperators(self, context)

    def logits(self, hidden: Tensor, norm: Tensor, head: Weight, context: CudaStepContext) -> Tensor:
        """See `Operators`; in the workspace. Tokens that are there for the product's sake alone are never drawn."""
        rows = hidden.shape[0]
        normed = context.workspace.normed[:rows]
        rms_norm(hidden, norm, self.shape.rms_eps, normed)
        logits = context.workspace.logits[:rows]
        self.multiply(normed, head, logits, context)
        if self.shape.vocab_size < logits.shape[1]:
            logits[:, self.shape.vocab_size :].fill_(float("-inf"))
        return logits

    def multiply(
        self,
        x: Tensor,
        weight: Weight,
        out: Tensor,
        context: CudaStepContext,
        residual: Tensor | None = None,
        wide: Tensor | None = None,
    ) -> None:
        """The matrix product chosen for this shape, these rows and these SMs."""
        n, k = weight.weight.shape
        choice = self.choices.choose(n, k, x.shape[0], context.sms, context.capturing)
        matmul(x, weight, out, choice, context.sms, context.workspace.matmul, residual, wide)


class CudaLayerOperators:
    """What all layers of a step share: its context."""

    def __init__(self, operators: CudaOperators, context: CudaStepContext) -> None:
        self._operators = operators
        self._shape = operators.shape
        self._context = context
        self._workspace = context.workspace

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `LayerOperators`."""
        out = self._workspace.normed[: x.shape[0]]
        rms_norm(x, weight, self._shape.rms_eps, out)
        return out

    def linear(self, x: Tensor, projection: Weight) -> Tensor:
        """See `LayerOperators`; the packed q, k and v are the only ones without an addition."""
        out = self._workspace.qkv[: x.shape[0]]
        self._operators.multiply(x, projection, out, self._context)
        return out

    def linear_add(self, x: Tensor, projection: Weight, residual: Tensor) -> Tensor:
        """See `LayerOperators`; adds to `residual` in place, in the product's epilogue."""
        self._operators.multiply(x, projection, residual, self._context, residual)
        return residual

    def gated(self, x: Tensor, projection: Weight) -> Tensor:
        """See `LayerOperators`."""
        rows, space = x.shape[0], self._workspace
        out = space.active[:rows]
        self._operators.multiply(x, projection, out, self._context, wide=space.gate_up[:rows])
        return out

    def attend(self, qkv: Tensor, qk_norm: Tensor | None, kv: Tensor) -> Tensor:
        """See `LayerOperators`."""
        shape, context = self._shape, self._context
        rope_write(
            qkv,
            context.positions,
            context.slots,
            self._operators.rope,
            kv,
            shape.num_heads,
            shape.num_kv_heads,
            qk_norm,
            shape.rms_eps,
        )
        rows = qkv.shape[0]
        q = qkv[:, : shape.num_heads * shape.head_dim].view(rows, shape.num_heads, shape.head_dim)
        out = self._workspace.attended[:rows]
        for part in context.attention:
            part.run(qkv, q, kv, out)
        return out
