"""The prefill lane's steps: layer groups of prompts, and mixed steps that carry decode rows along.

Knows nothing about threads. Small batches replay a graph over all layers, large ones are launched layer by layer; a
layer group leaves its activations in the workspace for the next, whatever stream that runs on. The end of a step,
head and sampling, is a graph of its own per number of sampled rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bulletserve.core.errors import EngineError
from bulletserve.core.launch import Launch, PromptPart
from bulletserve.core.partition import Lattice
from bulletserve.core.plan import PrefillGroup
from bulletserve.core.snapshot import MAX_BATCH_PROMPTS
from bulletserve.engine.cuda.attention import DecodePart, PrefillPart, decode_kernel
from bulletserve.engine.cuda.batch_inputs import BatchInputs, BatchSize, SegmentArrays
from bulletserve.engine.cuda.buckets import bucket_of
from bulletserve.engine.cuda.cuda_graphs import GraphKey, StepGraphs
from bulletserve.engine.cuda.library_attention import LibraryAttention
from bulletserve.engine.cuda.pinned_ring import TokenReturn
from bulletserve.engine.cuda.seat_tables import CudaSeats, SeatUpdate, SeatUpdater
from bulletserve.engine.cuda.tail import Tail
from bulletserve.engine.kv_cache import KvCache
from bulletserve.kernels.cuda.prefill_attention import PrefillSegments
from bulletserve.kernels.cuda.step_tables import begin_decode, gather_rows
from bulletserve.models.cuda_operators import AttentionPart, CudaStepContext, LaneWorkspace
from bulletserve.models.decoder import Decoder


@dataclass(slots=True)
class _Batch:
    """A prefill batch between its layer groups."""

    parts: tuple[PromptPart, ...]
    size: BatchSize
    segments: SegmentArrays
    hidden: Tensor
    planned_sms: int = 0
    next_layer: int = 0


class BatchSteps:
    """Queues prefill groups and mixed steps on the current stream."""

    def __init__(
        self,
        model: Decoder,
        cache: KvCache,
        seats: CudaSeats,
        workspace: LaneWorkspace,
        lattice: Lattice,
        *,
        max_tokens: int,
        token_buckets: Sequence[int],
        row_buckets: Sequence[int],
        library: LibraryAttention | None,
    ) -> None:
        shape, device = model.shape, model.device
        self._model, self._cache, self._seats, self.workspace = model, cache, seats, workspace
        self._lattice, self.layers = lattice, shape.num_layers
        self._token_buckets, self._row_buckets = token_buckets, row_buckets
        self._library = library
        self._updater = SeatUpdater(seats, device)
        self._in = BatchInputs(seats, max_tokens, cache.block_size, device)
        self._segments = PrefillSegments(MAX_BATCH_PROMPTS, device, self._in.segments)
        self._attention = decode_kernel(shape, cache, seats, lattice.total_sms)
        self._tail = Tail(model, seats, seats.max_seqs)
        self._return = TokenReturn(seats.max_seqs)
        self._batch: _Batch | None = None
        self.graphs = StepGraphs()

    def run(self, launch: Launch, update: SeatUpdate | None) -> Tensor | None:
        """Queue one step; the host tensor where its tokens will lie, if it draws any.

        Raises `EngineError` for a layer group whose batch was lost.
        """
        self._updater.apply(update)
        step = launch.step
        first, end = step.layer_range if isinstance(step, PrefillGroup) else (0, self.layers)
        if first == 0:
            self._batch = None
            size = self._in.measure(launch)
            key = self._graph_key(size, step.sms) if end == self.layers else None
            segments = self._in.send(launch, size, key.size if key else None)
            if key is not None:
                self._replay(key, segments)
                return self._draw(size, step.sms)
            self._batch = self._begin(launch.parts, size, segments, step.sms)
        batch, self._batch = self._batch, None
        if batch is None or batch.next_layer != first or batch.parts != launch.parts:
            raise EngineError("an earlier layer group of this prefill batch failed")
        context = self._context(batch.size.tokens, step.sms, self._eager_parts(batch, step.sms))
        self._model.run_layers(batch.hidden, first, end, context, self._cache)
        batch.next_layer = end
        if end < self.layers:
            self._batch = batch
            return None
        return self._draw(batch.size, step.sms)

    # --- eager ------------------------------------------------------------------------------------------------

    def _begin(self, parts: tuple[PromptPart, ...], size: BatchSize, segments: SegmentArrays, sms: int) -> _Batch:
        """Embed a batch."""
        if size.decode_rows:
            self._begin_decode(sms)
        context = self._context(size.tokens, sms, ())
        return _Batch(parts, size, segments, self._model.embed(self._in.ids[: size.tokens], context))

    def _begin_decode(self, sms: int) -> None:
        seats, own = self._seats.device, self._in
        begin_decode(
            own.decode_rows, own.live_rows, own.first_row, seats, self._cache.block_size, own.ids, own.positions,
            own.slots,
        )  # fmt: skip
        self._attention.schedule(own.decode_rows, seats.lengths, own.live_rows, own.first_row, sms)

    def _eager_parts(self, batch: _Batch, sms: int) -> tuple[AttentionPart, ...]:
        parts: list[AttentionPart] = []
        if batch.size.prompt_tokens:
            if self._library is not None and batch.planned_sms != sms:
                self._library.plan(batch.segments, sms, captured=False)
                batch.planned_sms = sms
            parts.append(self._prefill_part(sms))
        if batch.size.decode_rows:
            parts.append(self._decode_part())
        return tuple(parts)

    def _prefill_part(self, sms: int) -> AttentionPart:
        if self._library is not None:
            return self._library
        return PrefillPart(self._segments, self._seats.device.tables, sms, self._model.shape.sliding_window)

    def _decode_part(self) -> DecodePart:
        return DecodePart(self._attention, self._seats.device.tables)

    def _context(
        self, tokens: int, sms: int, parts: tuple[AttentionPart, ...], *, capturing: bool = False
    ) -> CudaStepContext:
        positions, slots = self._in.positions[:tokens], self._in.slots[:tokens]
        return CudaStepContext(sms, capturing, self.workspace, positions, slots, parts)

    def _draw(self, size: BatchSize, sms: int) -> Tensor | None:
        if not size.sampled:
            return None
        bucket = bucket_of(self._row_buckets, size.sampled)
        assert bucket is not None, "more rows sampled than there are seats"
        graph = self.graphs.get(GraphKey("tail", bucket, sms))
        if graph is not None:
            graph.replay()
        else:
            self._tail_work(bucket, sms, capturing=False)
        return self._return.fetch(self._tail.tokens[: size.sampled])

    # --- graphs -----------------------------------------------------------------------------------------------

    def _graph_key(self, size: BatchSize, sms: int) -> GraphKey | None:
        bucket = bucket_of(self._token_buckets, size.tokens)
        kind = "mixed" if size.decode_rows else "prefill"
        key = GraphKey(kind, bucket or 0, sms)
        return key if self.graphs.get(key) is not None else None

    def _replay(self, key: GraphKey, segments: SegmentArrays) -> None:
        graph = self.graphs.get(key)
        assert graph is not None
        if self._library is not None:
            self._library.plan(segments, key.sms, captured=True)
        graph.replay()

    def captures(self) -> Iterator[GraphKey]:
        """See `CapturedSteps`. "prefill" and "mixed" are sized by tokens, "tail" by sampled rows."""
        total = self._lattice.total_sms
        for sms in sorted(self._lattice.prefill_shares):
            for tokens in reversed(self._token_buckets):
                yield GraphKey("prefill", tokens, sms)
                if sms == total:
                    yield GraphKey("mixed", tokens, sms)
            for rows in reversed(self._row_buckets):
                if sms == total or rows <= _MOST_SAMPLED_ON_A_SHARE:
                    yield GraphKey("tail", rows, sms)

    def work(self, key: GraphKey, layers: int) -> None:
        """See `CapturedSteps`."""
        kind, count, sms = key
        if kind == "tail":
            self._tail_work(count, sms, capturing=True)
            return
        parts: tuple[AttentionPart, ...] = (self._prefill_part(sms),)
        if kind == "mixed":
            self._begin_decode(sms)
            parts = (*parts, self._decode_part())
        context = self._context(count, sms, parts, capturing=True)
        hidden = self._model.embed(self._in.ids[:count], context)
        self._model.run_layers(hidden, 0, layers, context, self._cache)

    def _tail_work(self, rows: int, sms: int, *, capturing: bool) -> None:
        own, space = self._in, self.workspace
        sampled = space.sampled[:rows]
        gather_rows(space.hidden, own.at[:rows], own.live_samples, sampled)
        context = self._context(rows, sms, (), capturing=capturing)
        self._tail.draw(sampled, own.sample_seats[:rows], own.live_samples, own.new_lengths[:rows], context)

    def pad(self) -> None:
        """Let the inputs be padding only, as captures and warm-ups want them."""
        self._in.clear()
        if self._library is not None:
            nothing = np.zeros(0, dtype=np.int32)
            segments = SegmentArrays(np.zeros(1, dtype=np.int32), nothing, nothing)
            self._library.plan(segments, self._lattice.total_sms, captured=True)

    def warm(self, stream: torch.cuda.Stream, sms: int, tokens: int, longest: int) -> None:
        """Compile and load what an eager step of `tokens` tokens needs, by running one layer of one.

        Its prompts, of at most `longest` tokens, sit on the padding seat, whose only block is no request's.
        """
        self._updater.warm()
        spare = self._seats.max_seqs
        self._seats.give_padding(longest)
        parts = [PromptPart(spare, 0, min(longest, tokens - at), False) for at in range(0, tokens, longest)]
        ranges = tuple((part.start, part.end) for part in parts)
        group = PrefillGroup((), ranges, (0, 1), sms)
        with torch.cuda.stream(stream):
            self.run(Launch(0, group, parts=tuple(parts)), None)
        self._batch = None


_MOST_SAMPLED_ON_A_SHARE = 32
