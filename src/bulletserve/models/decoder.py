"""The decoder of the Llama family: Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2 are one definition.

Knows nothing about requests, sampling or schedules. It runs any range of layers at a time, so a prefill can be
cut into layer groups, and holds weights only: everything of a step comes with its `StepContext`, so that two
lanes run steps at once. Projections that read the same input are packed into one weight (q, k, v; gate, up):
a decode step is bound by weight streaming and by the number of launches.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bulletserve.core.errors import BrokenCheckpoint
from bulletserve.core.shapes import ModelShape
from bulletserve.models.context import PagedKv
from bulletserve.models.cpu_operators import CpuOperators
from bulletserve.models.operators import Context, LayerOperators, Operators, Projection


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Projection
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: each head's own row
    output: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


class Decoder:
    """A decoder's weights and its forward, in pieces, by the `operators` of the device that holds them.

    Without `operators`, plain torch carries them out.

    `state` maps Hugging Face names to tensors in `dtype`, all on one device; names it does not know are
    ignored. With `consume` its entries are removed as they are packed, so that the peak memory is one copy of
    the weights and a layer. Raises BrokenCheckpoint if a tensor is missing or has another shape.

    All methods are safe to call from several threads at once.
    """

    def __init__(
        self,
        shape: ModelShape,
        state: Mapping[str, Tensor],
        dtype: torch.dtype,
        operators: Operators | None = None,
        *,
        consume: bool = False,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        take = _Take(state, dtype, consume)
        hidden, vocabulary = shape.hidden_size, shape.vocab_size
        self._embedding = take("model.embed_tokens.weight", vocabulary, hidden)
        self.device = self._embedding.device
        self._operators = operators or CpuOperators(shape, dtype, self.device)
        self._layers = [_pack_layer(shape, take, self._operators, i) for i in range(shape.num_layers)]
        self._final_norm = take("model.norm.weight", hidden)
        self._head = self._operators.pack(
            self._embedding if shape.tied_embeddings else take("lm_head.weight", vocabulary, hidden)
        )

    @torch.inference_mode()
    def embed(self, ids: Tensor, context: Context = None) -> Tensor:
        """Token ids [T] -> [T, hidden_size]."""
        return self._operators.embed(ids, self._embedding, context)

    @torch.inference_mode()
    def run_layers(self, hidden: Tensor, first: int, last: int, context: Context, cache: PagedKv) -> Tensor:
        """Layers `first`..`last` - 1 over `hidden` [T, hidden_size] -> the same shape; may overwrite `hidden`.

        Writes the tokens' K and V of these layers into `cache` before reading it. To run a step in groups, feed
        the result to the next range with the same context.
        """
        do = self._operators.begin(context, cache.layers[first])
        for index in range(first, last):
            hidden = self._run_layer(hidden, self._layers[index], cache.layers[index], do)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor, context: Context = None) -> Tensor:
        """Final norm and head for chosen rows [R, hidden_size] -> float32 [R, vocab_size]."""
        return self._operators.logits(hidden, self._final_norm, self._head, context)

    @property
    def projections(self) -> dict[tuple[int, int], list[Projection]]:
        """All projections as packed, by (out, in): the layers' in the order of execution, then the head."""
        layer = [p for each in self._layers for p in (each.qkv, each.output, each.gate_up, each.down)]
        found: dict[tuple[int, int], list[Projection]] = {}
        for projection in (*layer, self._head):
            found.setdefault((projection.weight.shape[0], projection.weight.shape[1]), []).append(projection)
        return found

    @property
    def head_shape(self) -> tuple[int, int]:
        """(out, in) of the head as packed."""
        return (self._head.weight.shape[0], self._head.weight.shape[1])

    def _run_layer(self, hidden: Tensor, layer: _Layer, kv: Tensor, do: LayerOperators) -> Tensor:
        qkv = do.linear(do.norm(hidden, layer.attention_norm), layer.qkv)
        hidden = do.linear_add(do.attend(qkv, layer.qk_norm, kv), layer.output, hidden)
        active = do.gated(do.norm(hidden, layer.mlp_norm), layer.gate_up)
        return do.linear_add(active, layer.down, hidden)


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


def _pack_layer(shape: ModelShape, take: _Take, operators: Operators, index: int) -> _Layer:
    pack = operators.pack
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
        gate_up=operators.pack_gated(*(take(f"{mlp}{n}_proj.weight", inner, hidden) for n in ("gate", "up"))),
        down=pack(take(f"{mlp}down_proj.weight", hidden, inner)),
    )
