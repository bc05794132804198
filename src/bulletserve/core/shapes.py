"""The shape of a decoder: every number that decides how much work a step is.

Knows nothing about weights, files or devices. A `ModelShape` is what the format readers produce, what the
decoder is built from and what forecasts are made of.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

_MOST = 1 << 31
_SIZES = (
    "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
    "max_context",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `kind` is "default" (none), "linear" or "llama3" (the piecewise scheme of Llama 3.1).
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One dense decoder of the Llama family. Sizes are element counts.

    `qkv_bias` is Qwen2's, `qk_norm` Qwen3's per-head RMSNorm; `sliding_window` is the attention window in
    tokens (None: full attention).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "ModelShape":
        """The inverse of `dataclasses.asdict`, after a file; fields of other versions are left out.

        Raises `ValueError`, `KeyError` or `TypeError` for what is no shape: sizes that no model has would else be found
        by whoever allocates or divides by them.
        """
        known = {one.name: document[one.name] for one in fields(cls) if one.name in document}
        shape = cls(**known | {"rope_scaling": RopeScaling(**document["rope_scaling"])})
        sizes = [getattr(shape, name) for name in _SIZES]
        if any(type(size) is not int or not 1 <= size <= _MOST for size in sizes):
            raise ValueError(f"sizes of a model are whole numbers from 1 to {_MOST}, not {sizes}")
        window = shape.sliding_window
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(f"a sliding window has at least one token, not {window!r}")
        if any(type(value) not in (int, float) or not 0 < value < inf for value in (shape.rms_eps, shape.rope_theta)):
            raise ValueError("rms_eps and rope_theta are numbers above 0")
        return shape

    def describe(self) -> str:
        """For people, such as "llama of 8.0 billion parameters"."""
        count = self.parameters
        size = f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.0f} million"
        return f"{self.architecture} of {size} parameters"

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token adds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Number of weights, embeddings counted once when tied."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv) + (q + 2 * kv if self.qkv_bias else 0)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + norms
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + tables + self.hidden_size
