"""Prefill attention by FlashInfer, bound to one lane.

Knows nothing about layers. A batch is planned on the host, for the SMs it runs on, and run for every layer. Where no
prompt has earlier tokens in the cache, K and V may be read from the batch's own rows: a fifth faster than from pages.
"""

from dataclasses import dataclass

from torch import Tensor

from bulletserve.engine.cuda.batch_inputs import SegmentArrays
from bulletserve.kernels.cuda.flashinfer_prefill import FlashInferPrefill


@dataclass(frozen=True, slots=True)
class LibraryPart:
    """The prompt rows of the batch that was planned last; an `AttentionPart`. `fresh`: K and V from their own rows."""

    kernel: FlashInferPrefill
    tables: Tensor
    kv_heads: int
    fresh: bool

    def run(self, qkv: Tensor, q: Tensor, kv: Tensor, out: Tensor) -> None:
        """See `AttentionPart`."""
        if not self.fresh:
            self.kernel.run(q, kv, self.tables, out)
            return
        heads = qkv.view(qkv.shape[0], -1, q.shape[2])
        first_v = q.shape[1] + self.kv_heads
        k, v = heads[:, q.shape[1] : first_v], heads[:, first_v:]
        self.kernel.run_fresh(q, k, v, out)


class LibraryAttention:
    """Plans batches; `part` gives what runs them."""

    def __init__(self, kernel: FlashInferPrefill, tables: Tensor, kv_heads: int) -> None:
        self._kernel = kernel
        self._width = tables.shape[1]
        self._parts = {fresh: LibraryPart(kernel, tables, kv_heads, fresh) for fresh in (False, True)}

    def part(self, *, fresh: bool) -> LibraryPart:
        """What runs batches that are planned as `fresh`, or not."""
        return self._parts[fresh]

    def plan(self, segments: SegmentArrays, sms: int, *, fresh: bool) -> None:
        """Plan a batch for a share of `sms` SMs; holds for the runs and replays queued until the next plan."""
        self._kernel.plan(segments.starts, segments.context, segments.seat, self._width, sms, fresh)
