"""What a decoder layer is made of, on whatever kind of device: the door between its structure and its kernels.

Knows nothing about either. `Decoder` says which operation follows which and holds the weights; an `Operators` says
how one is carried out and where its result lies. Results may live in memory that the next step of the same lane
uses again.
"""

from typing import Any, Protocol

from torch import Tensor

Projection = Any
"""A weight as an `Operators` packed it; opaque to everybody else but for `weight` [out, in]."""

Context = Any
"""What a step takes with it, None outside of one; each `Operators` has a type of its own."""


class LayerOperators(Protocol):
    """The operations of one step over T tokens, the same for all its layers."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of `x` [T, H]."""

    def linear(self, x: Tensor, projection: Projection) -> Tensor:
        """x [T, in] -> [T, out]."""

    def linear_add(self, x: Tensor, projection: Projection, residual: Tensor) -> Tensor:
        """`residual` [T, out] + linear(x); may overwrite `residual`."""

    def attend(self, qkv: Tensor, qk_norm: Tensor | None, kv: Tensor) -> Tensor:
        """Turns q and k of `qkv` [T, (heads + 2 * kv_heads) * head_dim], stores k and v in the layer's cache `kv`.

        `qk_norm` [heads + kv_heads, head_dim] is each head's own RMSNorm weight. Returns what the queries see,
        [T, heads * head_dim]. Overwrites `qkv`.
        """

    def gated(self, x: Tensor, projection: Projection) -> Tensor:
        """silu(x gate^T) * (x up^T) of x [T, in] -> [T, I]; `projection` from `pack_gated`."""


class Operators(Protocol):
    """One kind of device."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Projection:
        """Lay out `weight` [out, in] for this device."""

    def pack_gated(self, gate: Tensor, up: Tensor) -> Projection:
        """Lay out `gate` and `up` [I, in], which read the same input, as one."""

    def embed(self, ids: Tensor, table: Tensor, context: Context) -> Tensor:
        """Rows `ids` [T] of `table` [vocabulary, H]."""

    def begin(self, context: Context, kv: Tensor) -> LayerOperators:
        """Whatever the layers of one step share; `kv` is any layer's cache."""

    def logits(self, hidden: Tensor, norm: Tensor, head: Projection, context: Context) -> Tensor:
        """Final norm and head of chosen rows [R, H] -> float32 [R, vocabulary]."""
