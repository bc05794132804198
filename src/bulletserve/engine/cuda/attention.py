"""The attention of a step's rows, bound to the tables it reads: what a step context carries.

Knows nothing about layers. Each part writes its own rows of a batch: prompt rows first, decode rows after them. Which
kernel does decode is settled once, when the engine is loaded.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bulletserve.core.shapes import ModelShape
from bulletserve.engine.cuda.seat_tables import CudaSeats
from bulletserve.engine.kv_cache import KvCache
from bulletserve.kernels.cuda.decode_attention import DecodeAttention
from bulletserve.kernels.cuda.flashinfer_decode import FlashInferDecode, available
from bulletserve.kernels.cuda.prefill_attention import PrefillSegments, prefill_attention

_log = logging.getLogger(__name__)


class DecodeKernel(Protocol):
    """Decode attention of one lane: a step is scheduled once, on the device, and run for every layer."""

    def schedule(self, rows: Tensor, lengths: Tensor, live: Tensor, first_row: Tensor, sms: int) -> None:
        """Divide a step's work: seats `rows` int32 [B], `live` int32 [1] of them real, at batch row `first_row` [1]."""

    def run(self, q: Tensor, kv: Tensor, tables: Tensor, out: Tensor) -> None:
        """One layer of the scheduled step: rows `first_row` and after it of `q` and `out`."""


def decode_kernel(shape: ModelShape, cache: KvCache, seats: CudaSeats, max_sms: int) -> DecodeKernel:
    """FlashInfer's kernel with our division of work where it can be had, else our own. One for each lane."""
    device, dtype = cache.layers[0].device, cache.layers[0].dtype
    sizes = (seats.max_seqs, shape.num_heads, shape.num_kv_heads, shape.head_dim, cache.block_size, max_sms, device)
    why = available(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, shape.sliding_window)
    if why is None:
        rows, width = seats.device.tables.shape
        return FlashInferDecode(*sizes, dtype, (rows, width))
    _log.warning("decode uses our own attention kernel: %s", why)
    return DecodeAttention(*sizes, shape.sliding_window)


@dataclass(frozen=True, slots=True)
class DecodePart:
    """One token each of the rows that `kernel` was scheduled for."""

    kernel: DecodeKernel
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
