"""The decoder of the Llama family: Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2 are one definition.

Knows nothing about requests, sampling or schedules. It runs any range of layers at a time, so a prefill can be
cut into layer groups, and holds weights only: everything of a step comes with its `StepContext`, so that two
lanes run steps at once. Projections that read the same input are packed into one weight (q, k, v; gate, up):
a decode step is bound by weight streaming and by the number of launches.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bulletserve.core.errors import BrokenCheckpoint
from bulletserve.core.shapes import ModelShape
from bulletserve.kernels.attention import (
    decode_attention,
    decode_mask,
    gather_kv,
    page_index,
    prefill_attention,
    slot_index,
    write_kv,
)
from bulletserve.kernels.matmul import Projection, gated_silu, linear, linear_add, pack
from bulletserve.kernels.norm import rms_norm
from bulletserve.kernels.rope import apply_rope
from bulletserve.models.context import PagedKv, StepContext
from bulletserve.models.rotary import Rotary


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Projection
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: each head's own row
    output: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class _StepPlan:
    """What all layers of a step share: rotary angles, places in the cache and the decode rows' mask.

    A prefill segment without earlier context reads no pages.
    """

    cos: Tensor
    signed_sin: Tensor
    slots: Tensor
    prefill_pages: tuple[Tensor | None, ...]
    decode_pages: Tensor | None
    decode_mask: Tensor | None


class Decoder:
    """A decoder's weights and its forward, in pieces.

    `state` maps Hugging Face names to tensors in `dtype`, all on one device; names it does not know are
    ignored. With `consume` its entries are removed as they are packed, so that the peak memory is one copy of
    the weights and a layer. Raises BrokenCheckpoint if a tensor is missing or has another shape.

    All methods are safe to call from several threads at once.
    """

    def __init__(
        self, shape: ModelShape, state: Mapping[str, Tensor], dtype: torch.dtype, *, consume: bool = False
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        take = _Take(state, dtype, consume)
        hidden, vocabulary = shape.hidden_size, shape.vocab_size
        self._embedding = take("model.embed_tokens.weight", vocabulary, hidden)
        self.device = self._embedding.device
        self._layers = [_pack_layer(shape, take, i) for i in range(shape.num_layers)]
        self._final_norm = take("model.norm.weight", hidden)
        self._head = pack(self._embedding if shape.tied_embeddings else take("lm_head.weight", vocabulary, hidden))
        self._rotary = Rotary(shape, dtype, self.device)

    @torch.inference_mode()
    def embed(self, ids: Tensor) -> Tensor:
        """Token ids int64 [T] -> [T, hidden_size]."""
        return F.embedding(ids, self._embedding)

    @torch.inference_mode()
    def run_layers(self, hidden: Tensor, first: int, last: int, context: StepContext, cache: PagedKv) -> Tensor:
        """Layers `first`..`last` - 1 over `hidden` [T, hidden_size] -> the same shape, a new tensor.

        Writes the tokens' K and V of these layers into `cache` before reading it. To run a step in groups, feed
        the result to the next range with the same context.
        """
        plan = self._plan(context, cache.layers[first])
        for index in range(first, last):
            hidden = self._run_layer(hidden, self._layers[index], cache.layers[index], context, plan)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head for chosen rows [R, hidden_size] -> float32 [R, vocab_size]."""
        normed = rms_norm(hidden, self._final_norm, self.shape.rms_eps)
        return linear(normed, self._head).to(torch.float32)

    def _plan(self, context: StepContext, kv: Tensor) -> _StepPlan:
        cos, signed_sin = self._rotary.angles(context.positions)
        decode_pages = mask = None
        if (decode := context.decode) is not None:
            decode_pages = page_index(decode.block_tables, decode.max_length, kv)
            mask = decode_mask(decode.lengths, decode.max_length, self.shape.sliding_window, kv)
        prefill_pages = tuple(
            page_index(segment.block_table.unsqueeze(0), segment.context_tokens, kv)
            if segment.context_tokens > segment.stop - segment.start
            else None
            for segment in context.prefill
        )
        return _StepPlan(cos, signed_sin, slot_index(context.kv_slots, kv), prefill_pages, decode_pages, mask)

    def _run_layer(self, hidden: Tensor, layer: _Layer, kv: Tensor, context: StepContext, plan: _StepPlan) -> Tensor:
        shape = self.shape
        qkv = linear(rms_norm(hidden, layer.attention_norm, shape.rms_eps), layer.qkv)
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        q, new_kv = heads[:, : shape.num_heads], heads[:, shape.num_heads :]
        turning = heads[:, : shape.num_heads + shape.num_kv_heads]
        if layer.qk_norm is not None:
            turning.copy_(rms_norm(turning, layer.qk_norm, shape.rms_eps))
        apply_rope(turning, plan.cos, plan.signed_sin)
        write_kv(kv, new_kv, plan.slots)
        hidden = linear_add(self._attend(q, new_kv, kv, context, plan), layer.output, hidden)
        gate_up = linear(rms_norm(hidden, layer.mlp_norm, shape.rms_eps), layer.gate_up)
        return linear_add(gated_silu(gate_up), layer.down, hidden)

    def _attend(self, q: Tensor, new_kv: Tensor, kv: Tensor, context: StepContext, plan: _StepPlan) -> Tensor:
        outputs = []
        for segment, pages in zip(context.prefill, plan.prefill_pages, strict=True):
            rows = slice(segment.start, segment.stop)
            if pages is None:
                k, v = new_kv[rows].transpose(0, 1).chunk(2)
            else:
                k, v = (side[:, : segment.context_tokens] for side in gather_kv(kv, pages, 1))
            outputs.append(prefill_attention(q[rows], k, v, self.shape.sliding_window))
        if (decode := context.decode) is not None:
            assert plan.decode_pages is not None and plan.decode_mask is not None
            k, v = gather_kv(kv, plan.decode_pages, decode.stop - decode.start)
            outputs.append(decode_attention(q[decode.start : decode.stop], k, v, plan.decode_mask))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _Take:
    """Takes named tensors out of a state, checked."""

    def __init__(self, state: Mapping[str, Tensor], dtype: torch.dtype, consume: bool) -> None:
        self._state, self._dtype = state, dtype
        self._consume = consume

    def __call__(self, name: str, *size: int) -> Tensor:
        tensor = self._state.get(name)
        if tensor is None:
            raise BrokenCheckpoint(f"the checkpoint has no tensor {name!r}")
        if tuple(tensor.shape) != size:
            raise BrokenCheckpoint(f"{name!r} is {tuple(tensor.shape)}, the model's shape wants {size}")
        if self._consume and isinstance(self._state, MutableMapping):
            del self._state[name]
        return tensor.detach().to(self._dtype)


def _pack_layer(shape: ModelShape, take: _Take, index: int) -> _Layer:
    prefix = f"model.layers.{index}."
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    wide = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
    bias = torch.cat([take(f"{attention}{n}.bias", size) for n, size in wide]) if shape.qkv_bias else None
    qk_norm = None
    if shape.qk_norm:
        q_norm = take(f"{attention}q_norm.weight", shape.head_dim).expand(shape.num_heads, -1)
        k_norm = take(f"{attention}k_norm.weight", shape.head_dim).expand(shape.num_kv_heads, -1)
        qk_norm = torch.cat((q_norm, k_norm))
    return _Layer(
        attention_norm=take(f"{prefix}input_layernorm.weight", hidden),
        qkv=pack(torch.cat([take(f"{attention}{n}.weight", size, hidden) for n, size in wide]), bias),
        qk_norm=qk_norm,
        output=pack(take(f"{attention}o_proj.weight", hidden, q)),
        mlp_norm=take(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=pack(torch.cat([take(f"{mlp}{n}_proj.weight", inner, hidden) for n in ("gate", "up")])),
        down=pack(take(f"{mlp}down_proj.weight", hidden, inner)),
    )
