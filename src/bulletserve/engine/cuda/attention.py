"""The attention of a step's rows, bound to the tables it reads: what a step context carries.

Knows nothing about layers. Each part writes its own rows of a batch: prompt rows first, decode rows after them.
"""

from dataclasses import dataclass

from torch import Tensor

from bulletserve.core.shapes import ModelShape
from bulletserve.engine.cuda.seat_tables import CudaSeats
from bulletserve.engine.kv_cache import KvCache
from bulletserve.kernels.cuda.decode_attention import DecodeAttention
from bulletserve.kernels.cuda.prefill_attention import PrefillSegments, prefill_attention


def decode_attention(shape: ModelShape, cache: KvCache, seats: CudaSeats, max_sms: int) -> DecodeAttention:
    """The kernel of one lane, with its scratch memory."""
    heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
    return DecodeAttention(
        seats.max_seqs, *heads, cache.block_size, max_sms, cache.layers[0].device, shape.sliding_window
    )


@dataclass(frozen=True, slots=True)
class DecodePart:
    """One token each of the rows that `kernel` was scheduled for."""

    kernel: DecodeAttention
    tables: Tensor

    def run(self, qkv: Tensor, q: Tensor, kv: Tensor, out: Tensor) -> None:
        """See `AttentionPart`."""
        self.kernel.run(q, kv, self.tables, out)


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """The prompt rows described by `segments`, by our own kernel."""

    segments: PrefillSegments
    tables: Tensor
    sms: int
    window: int | None

    def run(self, qkv: Tensor, q: Tensor, kv: Tensor, out: Tensor) -> None:
        """See `AttentionPart`."""
        prefill_attention(q, kv, self.tables, self.segments, out, self.sms, self.window)
