"""What a checkpoint is once its files are understood: the plain data that every reader here produces.

Knows nothing about file formats. A `Checkpoint` holds no weights and no open file: it can be sent to another
process, and `tensors` opens the files anew wherever it is called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from bulletserve.core.errors import BrokenCheckpoint
from bulletserve.core.shapes import ModelShape

SERVED_DTYPES = ("bfloat16", "float16", "float32")
"""The dtype tags a model's weights may have. numpy has no bfloat16: its arrays are the raw bits as uint16."""

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, not yet read.

    `name` is Hugging Face's, `shape` is row-major (output features first), `dtype` the tag of what `read`
    returns: a name out of `SERVED_DTYPES`, or another format's word for a tensor that no decoder of ours
    takes. `read` returns an array that may be a read-only view of the mapped file, or a fresh one where it
    was dequantised.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Array]


class Weights(Protocol):
    """Where a checkpoint's tensors lie."""

    def tensors(self) -> Iterator[StoredTensor]:
        """Open the files and describe each tensor in them."""
        ...

    def paths(self) -> Sequence[Path]:
        """The files themselves."""
        ...


@dataclass(frozen=True, slots=True)
class JsonTokenizer:
    """A `tokenizer.json` of the tokenizers library, and what `tokenizer_config.json` says ({} if absent)."""

    path: Path
    config: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A vocabulary out of GGUF metadata.

    `model` is the algorithm ("gpt2": byte-level BPE, "llama": SentencePiece), `pre` the name of the split
    that comes before it ("smollm", "llama-bpe", "qwen2"). `token_types` are GGUF's: 1 normal, 2 unknown, 3
    control, 4 user-defined, 5 unused, 6 byte. `merges` are pairs joined by a blank, `scores`
    SentencePiece's; either may be empty.
    """

    model: str
    pre: str
    tokens: tuple[str, ...] = field(repr=False)
    token_types: tuple[int, ...] = field(repr=False)
    merges: tuple[str, ...] = field(repr=False)
    scores: tuple[float, ...] = field(repr=False)
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    pad_token_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool


TokenizerSource: TypeAlias = JsonTokenizer | GgufTokenizer


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling values of `generation_config.json` for requests that set none. None: the file does not say.

    `do_sample` is left out on purpose. transformers takes false and absent alike (greedy), and most
    published files leave it absent, so it does not tell an author's wish from an omission; a client of an
    OpenAI-compatible server that sends no temperature expects sampling. vLLM reads the same six values and
    ignores it too.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that is known of a model before its weights are read.

    `name` is what it is served as unless told otherwise; generation ends at any of `eos_token_ids`;
    `default_dtype` is the checkpoint's own, out of `SERVED_DTYPES`; `weights` is None for a checkpoint
    opened with `load_format="dummy"`, which has a shape only.
    """

    name: str
    shape: ModelShape
    default_dtype: str
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation_defaults: GenerationDefaults = GenerationDefaults()
    chat_template: str | None = None
    tokenizer: TokenizerSource | None = None
    weights: Weights | None = None

    def tensors(self) -> Iterator[StoredTensor]:
        """Every stored tensor in the order of the files, none read yet; nothing for a dummy.

        Raises `ModelMissing` or `BrokenCheckpoint` if the files have changed since the checkpoint was opened.
        """
        return iter(()) if self.weights is None else self.weights.tensors()


_MOST = {
    "num_layers": 4096,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 26,
    "max_context": 1 << 32,
}


def check_shape(shape: ModelShape, where: str) -> ModelShape:
    """The shape itself, if a decoder can have it; else `BrokenCheckpoint`.

    The upper bounds are far above any model. They stop a damaged number from becoming an allocation.
    """
    for name, most in _MOST.items():
        if not 1 <= getattr(shape, name) <= most:
            raise BrokenCheckpoint(f"{where}: {name} is {getattr(shape, name)}, outside 1 to {most}")
    if shape.num_heads % shape.num_kv_heads:
        raise BrokenCheckpoint(
            f"{where}: {shape.num_heads} attention heads cannot share {shape.num_kv_heads} key-value heads"
        )
    if shape.head_dim % 2:
        raise BrokenCheckpoint(f"{where}: head_dim is {shape.head_dim}, but rotary embeddings turn pairs")
    for name in ("rms_eps", "rope_theta"):
        if getattr(shape, name) <= 0:
            raise BrokenCheckpoint(f"{where}: {name} is {getattr(shape, name)}, but must be positive")
    return shape
