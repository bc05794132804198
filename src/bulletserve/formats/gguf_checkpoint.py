"""A GGUF file as a checkpoint: its tensors under Hugging Face's names, beside what the metadata says.

Knows nothing about the container's bytes (`gguf` does). llama.cpp turns rotary pairs (0, 1), (2, 3), ... of
a head where Hugging Face turns (i, i + head_dim / 2), so converters reorder the rows of q and k within each
head for the architecture "llama"; they are put back here. Qwen's are left alone by both sides.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bulletserve.core.errors import BrokenCheckpoint, UnsupportedModel
from bulletserve.core.shapes import ModelShape
from bulletserve.formats.description import Array, Checkpoint, StoredTensor
from bulletserve.formats.fields import Fields
from bulletserve.formats.gguf import GgufFile, GgufTensor
from bulletserve.formats.gguf_shape import ROPE_DIVISORS, gguf_shape
from bulletserve.formats.gguf_vocabulary import gguf_end_tokens, gguf_tokenizer

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,4})\.)?(?P<part>\w+)\.(?P<kind>weight|bias)", re.ASCII)


def open_gguf(path: Path, *, name: str | None = None, dummy: bool = False) -> Checkpoint:
    """Everything but the weights; `name` defaults to the file's stem.

    Raises `ModelMissing`, `BrokenCheckpoint`, or `UnsupportedModel` with what is supported.
    """
    file = GgufFile(path)
    shape = gguf_shape(file)
    tokenizer = gguf_tokenizer(file.metadata, str(path), shape.vocab_size)
    return Checkpoint(
        name=name or path.stem,
        shape=shape,
        default_dtype=_default_dtype(file),
        eos_token_ids=gguf_end_tokens(file.metadata, str(path), tokenizer) if tokenizer else (),
        bos_token_id=tokenizer.bos_token_id if tokenizer else None,
        chat_template=Fields(file.metadata, str(path)).optional_text("tokenizer.chat_template"),
        tokenizer=tokenizer,
        weights=None if dummy else GgufWeights(path, shape),
    )


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """The tensors of the file at `path`, whose metadata gave `shape`."""

    path: Path
    shape: ModelShape

    def paths(self) -> Sequence[Path]:
        """The one file."""
        return (self.path,)

    def tensors(self) -> Iterator[StoredTensor]:
        """Every tensor of the decoder, with Hugging Face's name and order of rows."""
        file = GgufFile(self.path)
        for tensor in file.tensors.values():
            if tensor.name == ROPE_DIVISORS:  # became a part of the shape
                continue
            name = _hugging_face_name(tensor.name, self.path)
            read = partial(_read, file, tensor, self._paired_heads(name))
            yield StoredTensor(name, tensor.shape, tensor.encoding.dtype, read)

    def _paired_heads(self, name: str) -> int | None:
        """The number of heads in a tensor whose rows the converter has reordered, None for all others."""
        if self.shape.architecture != "llama":
            return None
        if ".q_proj." in name:
            return self.shape.num_heads
        return self.shape.num_kv_heads if ".k_proj." in name else None


def _hugging_face_name(name: str, path: Path) -> str:
    found = _NAME.fullmatch(name)
    if found and found["layer"] is None and found["part"] in _OUTER:
        return f"{_OUTER[found['part']]}.{found['kind']}"
    if found and found["layer"] is not None and found["part"] in _IN_LAYER:
        return f"model.layers.{int(found['layer'])}.{_IN_LAYER[found['part']]}.{found['kind']}"
    raise UnsupportedModel(f"{path}: tensor {name!r:.80} is no part of a decoder that we run")


def _read(file: GgufFile, tensor: GgufTensor, paired_heads: int | None) -> Array:
    array = file.read(tensor)
    if paired_heads is None:
        return array
    rows = tensor.shape[0]
    if rows % (2 * paired_heads):
        raise BrokenCheckpoint(f"{file.path}: {tensor.name} has {rows} rows, not {paired_heads} heads of pairs")
    pairs = array.reshape(paired_heads, rows // paired_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _default_dtype(file: GgufFile) -> str:
    """The dtype of most of the weights; bfloat16 for quantised ones, the dtype such models were trained in."""
    elements: dict[str, int] = {}
    for tensor in file.tensors.values():
        dtype = "bfloat16" if tensor.encoding.decode else tensor.encoding.dtype
        elements[dtype] = elements.get(dtype, 0) + math.prod(tensor.shape)
    return max(elements, key=elements.__getitem__)
