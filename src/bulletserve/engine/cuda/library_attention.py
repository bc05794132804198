"""Prefill attention by FlashInfer, bound to one lane.

Knows nothing about layers. A batch is planned on the host, for the SMs it runs on, and run for every layer. Where no
prompt has earlier tokens in the cache, K and V are read from the batch's own rows: a fifth faster than from pages.
"""

import numpy as np
from torch import Tensor

from bulletserve.engine.cuda.batch_inputs import SegmentArrays
from bulletserve.kernels.cuda.flashinfer_prefill import FlashInferPrefill


class LibraryAttention:
    """The prompt rows of the batch that was planned last; an `AttentionPart`."""

    def __init__(self, kernel: FlashInferPrefill, tables: Tensor, kv_heads: int) -> None:
        self._kernel = kernel
        self._tables = tables
        self._kv_heads = kv_heads
        self._fresh = False

    def plan(self, segments: SegmentArrays, sms: int, *, captured: bool) -> None:
        """Plan a batch for a share of `sms` SMs; holds for the runs and replays queued until the next plan.

        `captured`: they are replays, and a graph always reads pages.
        """
        self._fresh = not captured and bool(np.array_equal(segments.context, np.diff(segments.starts)))
        width = self._tables.shape[1]
        self._kernel.plan(segments.starts, segments.context, segments.seat, width, sms, self._fresh)

    def run(self, qkv: Tensor, q: Tensor, kv: Tensor, out: Tensor) -> None:
        """See `AttentionPart`."""
        if not self._fresh:
            self._kernel.run(q, kv, self._tables, out)
            return
        heads = qkv.view(qkv.shape[0], -1, q.shape[2])
        first_v = q.shape[1] + self._kv_heads
        k, v = heads[:, q.shape[1] : first_v], heads[:, first_v:]
        self._kernel.run_fresh(q, k, v, out)
