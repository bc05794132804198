"""What one step needs beside weights: where its tokens stand, where their K and V go, what they may see.

Knows nothing about requests or lanes. It is made by the engine, passed as an argument and never kept: two lanes
run steps of one model at the same time.

The tokens of a step lie in one row-major batch, prefill segments first, decode rows last. A prefill segment is
the next piece of one sequence; chunked prefill and a cached prefix are the same thing, a segment with earlier
context. All tensors are on the model's device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class PagedKv(Protocol):
    """The cache a step reads and writes: one tensor per layer, in the layout of `kernels/attention`."""

    @property
    def layers(self) -> Sequence[Tensor]:
        """`layers[i]` is [blocks, 2, kv_heads, block_size, head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Rows `start`..`stop` of the batch: the last stop - start tokens of a sequence of `context_tokens` tokens.

    `block_table` int64 [>= blocks of context_tokens]: the sequence's blocks in order.
    """

    start: int
    stop: int
    block_table: Tensor
    context_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeSegment:
    """Rows `start`..`stop` of the batch: one token of each of B sequences.

    `block_tables` int64 [B, >= blocks of max_length], unused entries any valid id; `lengths` int64 [B], the
    row's own token included; `max_length` is the greatest of them.
    """

    start: int
    stop: int
    block_tables: Tensor
    lengths: Tensor
    max_length: int


@dataclass(frozen=True, slots=True)
class StepContext:
    """One step over T tokens.

    `positions` int64 [T]: each token's place in its sequence. `kv_slots` int64 [T]: where its K and V go,
    block_id * block_size + offset, no two the same.
    """

    positions: Tensor
    kv_slots: Tensor
    prefill: tuple[PrefillSegment, ...] = ()
    decode: DecodeSegment | None = None
