"""A decoder's weights as torch tensors: out of a checkpoint, or random at the same shapes.

Knows what a complete decoder consists of; nothing about file formats (`formats` does) nor about how the
weights are used. Names and layouts are Hugging Face's: a projection is [output features, input features].
With tied embeddings there is no `lm_head.weight`: the embeddings serve as both.
"""

import math
from collections.abc import Iterable

import torch

from bulletserve.core.errors import BrokenCheckpoint, UnsupportedModel
from bulletserve.core.shapes import ModelShape
from bulletserve.formats.description import SERVED_DTYPES, Checkpoint, StoredTensor

# Left behind by old versions of transformers, which derived them from the shape.
_DERIVED = (".rotary_emb.inv_freq", ".self_attn.masked_bias")

# Values that every dummy tensor is cut from. A prime number of them, so that rows, which are shorter, repeat only
# after as many rows as there are values.
_POOL_VALUES = 4_194_301


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor that a decoder of this shape needs, by name, in the order of execution."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if shape.qkv_bias:
        layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", kv), ("v", kv))}
    if shape.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (shape.head_dim,) for name in ("q", "k")}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for index in range(shape.num_layers):
        shapes |= {f"model.layers.{index}.{name}": size for name, size in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not shape.tied_embeddings:
        shapes["lm_head.weight"] = (shape.vocab_size, hidden)
    return shapes


def load_state(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> dict[str, torch.Tensor]:
    """All weights of the checkpoint in `dtype` on `device`, named as in `tensor_shapes`; a dummy's from
    `seed`.

    Names and shapes are checked before anything is read; then one tensor at a time is on its way. Raises
    `BrokenCheckpoint` for tensors that are missing or misshapen, `UnsupportedModel` for ones of a dtype we
    do not run, or that we would leave out although they change results.
    """
    if checkpoint.weights is None:
        return dummy_state(checkpoint.shape, dtype, device, seed)
    stored = {tensor.name: tensor for tensor in checkpoint.tensors()}
    wanted = tensor_shapes(checkpoint.shape)
    _check_complete(checkpoint, stored, wanted)
    _check_unused(checkpoint, (tensor for name, tensor in stored.items() if name not in wanted))
    return {name: _torch_tensor(stored[name]).to(device=device, dtype=dtype) for name in wanted}


def dummy_state(
    shape: ModelShape, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random weights, the same for the same seed on every device, for runs where only the work matters.

    A projection keeps the variance of its input; the two that write to the residual stream are smaller, so
    that the stream's variance does not grow with depth; logits of the final norm have a spread of about
    one.
    """
    pool = torch.randn(_POOL_VALUES, generator=torch.Generator().manual_seed(seed)).to(device)
    state: dict[str, torch.Tensor] = {}
    offset = 0
    for name, size in tensor_shapes(shape).items():
        values = torch.empty(size, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            state[name] = values.fill_(1)
            continue
        spread = 1 / math.sqrt(size[-1])  # a bias counts as one more input
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            spread /= math.sqrt(2 * shape.num_layers)
        state[name] = _fill(values, pool, offset).mul_(spread)
        offset = (offset + values.numel()) % _POOL_VALUES
    return state


def _fill(values: torch.Tensor, pool: torch.Tensor, offset: int) -> torch.Tensor:
    """Copy the pool into `values` from `offset` on, as often as it takes."""
    flat, done = values.view(-1), 0
    while done < flat.numel():
        piece = pool[offset : offset + flat.numel() - done]
        flat[done : done + piece.numel()].copy_(piece)
        done, offset = done + piece.numel(), 0
    return values


def _torch_tensor(stored: StoredTensor) -> torch.Tensor:
    """The tensor on the CPU in its own dtype, in memory of its own: a view of the file would follow its changes."""
    array = stored.read()
    owned = torch.from_numpy(array if array.flags.writeable else array.copy())
    return owned.view(torch.bfloat16) if stored.dtype == "bfloat16" else owned


def _check_complete(
    checkpoint: Checkpoint, stored: dict[str, StoredTensor], wanted: dict[str, tuple[int, ...]]
) -> None:
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise BrokenCheckpoint(f"{checkpoint.name}: {len(missing)} tensors are missing: {_first(missing)}")
    present = [(stored[name], size) for name, size in wanted.items()]
    misshapen = [f"{tensor.name} is {tensor.shape}, not {size}" for tensor, size in present if tensor.shape != size]
    if misshapen:
        raise BrokenCheckpoint(f"{checkpoint.name}: {len(misshapen)} tensors do not fit: {_first(misshapen)}")
    unserved = [f"{tensor.name} is {tensor.dtype}" for tensor, _ in present if tensor.dtype not in SERVED_DTYPES]
    if unserved:
        raise UnsupportedModel(f"{checkpoint.name}: we run {', '.join(SERVED_DTYPES)}, but {_first(unserved)}")


def _check_unused(checkpoint: Checkpoint, unused: Iterable[StoredTensor]) -> None:
    """Refuse what belongs to a part that we run, yet would be left out: a bias, a norm. Zeros change nothing."""
    layers = (f"model.layers.{index}." for index in range(checkpoint.shape.num_layers))
    running = (
        *layers,
        "model.norm.",
        "lm_head.bias",
    )  # a tied model may repeat its embeddings as lm_head.weight
    for tensor in unused:
        if not tensor.name.startswith(running) or tensor.name.endswith(_DERIVED):
            continue
        if not tensor.name.endswith(".bias") or tensor.read().any():
            raise UnsupportedModel(f"{checkpoint.name}: {tensor.name} is no part of a decoder that we run")


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
