"""The prefill lane's steps: layer groups of prompts, and mixed steps that carry decode rows along.

Knows nothing about threads. Launching a layer kernel by kernel costs Python a third of a millisecond, as long as the
device takes for 500 tokens of it. So small batches replay one graph over all layers, middling ones a graph per layer,
which fits any cut into layer groups, and only large ones are launched eagerly. A group leaves its activations in the
workspace for the next, whatever stream that runs on. The end of a step, head and sampling, is a graph of its own per
number of sampled rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bulletserve.core.errors import EngineError
from bulletserve.core.launch import Launch, PromptPart
from bulletserve.core.partition import Lattice
from bulletserve.core.plan import PrefillGroup
from bulletserve.core.snapshot import MAX_BATCH_PROMPTS
from bulletserve.core.token_rules import MOST_LOGPROBS
from bulletserve.engine.cuda.attention import DecodePart, PrefillPart, decode_attention
from bulletserve.engine.cuda.batch_inputs import BatchInputs, BatchSize, SegmentArrays
from bulletserve.engine.cuda.buckets import bucket_of
from bulletserve.engine.cuda.cuda_graphs import GraphKey, StepGraphs
from bulletserve.engine.cuda.library_attention import LibraryAttention
from bulletserve.engine.cuda.pinned_ring import TokenReturn
from bulletserve.engine.cuda.seat_tables import CudaSeats, SeatUpdate, SeatUpdater
from bulletserve.engine.cuda.tail import Tail
from bulletserve.engine.drawn import Drawn
from bulletserve.engine.kv_cache import KvCache
from bulletserve.engine.masked import masked_rows
from bulletserve.engine.ruled_seats import PROMPT_PIECE, PromptRun
from bulletserve.kernels.cuda.prefill_attention import PrefillSegments
from bulletserve.kernels.cuda.step_tables import begin_decode, gather_rows
from bulletserve.kernels.token_rules import to_device
from bulletserve.models.cuda_operators import AttentionPart, CudaStepContext, LaneWorkspace
from bulletserve.models.decoder import Decoder


@dataclass(slots=True)
class _Batch:
    """A batch on its way through the layers: `rows` rows with padding, `whole` if one graph takes it through all."""

    parts: tuple[PromptPart, ...]
    size: BatchSize
    segments: SegmentArrays
    rows: int
    whole: torch.cuda.CUDAGraph | None
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
        layer_buckets: Sequence[int],
        row_buckets: Sequence[int],
        library: LibraryAttention | None,
    ) -> None:
        shape, device = model.shape, model.device
        self._model, self._cache, self._seats, self.workspace = model, cache, seats, workspace
        self._lattice, self.layers = lattice, shape.num_layers
        self._token_buckets, self._layer_buckets, self._row_buckets = token_buckets, layer_buckets, row_buckets
        self._piece_rows = max(rows for rows in row_buckets if rows <= max(PROMPT_PIECE, row_buckets[0]))
        self._library = library
        self._updater = SeatUpdater(seats, device)
        self._in = BatchInputs(seats, max_tokens, cache.block_size, device)
        self._segments = PrefillSegments(MAX_BATCH_PROMPTS, device, self._in.segments)
        self._attention = decode_attention(shape, cache, seats, lattice.total_sms)
        self._tail = Tail(model, seats, workspace, seats.max_seqs)
        self._return = TokenReturn(seats.max_seqs)
        self._batch: _Batch | None = None
        self.graphs = StepGraphs()

    def run(self, launch: Launch, update: SeatUpdate | None) -> Drawn:
        """Queue one step; what it draws, if anything, will lie on the host.

        Raises `EngineError` for a layer group whose batch was lost.
        """
        self._updater.apply(update)
        step = launch.step
        first, end = step.layer_range if isinstance(step, PrefillGroup) else (0, self.layers)
        if first == 0:
            self._batch = None
            self._batch = self._begin(launch, step.sms, whole=end == self.layers)
        batch, self._batch = self._batch, None
        if batch is None or batch.next_layer != first or batch.parts != launch.parts:
            raise EngineError("an earlier layer group of this prefill batch failed")
        self._run_layers(batch, first, end, step.sms)
        batch.next_layer = end
        if end < self.layers:
            self._batch = batch
            return Drawn()
        return self._draw(launch, batch.size, step.sms)

    def give_up(self, launch: Launch, update: SeatUpdate | None) -> None:
        """See `LaneSteps`. Prompts that a mixed step was to finish are rows of the next step already."""
        self._batch = None
        self._updater.apply(update)
        self._updater.apply(self._seats.back(launch.parts))

    def _begin(self, launch: Launch, sms: int, *, whole: bool) -> _Batch:
        """Send a batch's inputs and embed it. `whole`: the step runs all layers."""
        size = self._in.measure(launch)
        bucket, graph = None, None
        if whole:
            bucket = bucket_of(self._token_buckets, size.tokens)
            graph = self.graphs.get(GraphKey("mixed" if size.decode_rows else "prefill", bucket or 0, sms))
        if graph is None:
            bucket = bucket_of(self._layer_buckets, size.tokens) if size.tokens > self._token_buckets[-1] else None
        rows = bucket or size.tokens
        batch = _Batch(launch.parts, size, self._in.send(launch, size, rows), rows, graph)
        if graph is None:
            if size.decode_rows:
                self._begin_decode(sms)
            self._model.embed(self._in.ids[:rows], self._context(rows, sms, ()))
            # No attention writes padding rows: what somebody left there would go through all layers, and a NaN of it
            # reach the prompt beside them where a kernel reads K and V from the batch's own rows.
            self.workspace.attended[size.tokens : rows].zero_()
        return batch

    def _run_layers(self, batch: _Batch, first: int, end: int, sms: int) -> None:
        fresh = self._library is not None and batch.whole is None and not batch.size.decode_rows
        fresh = fresh and batch.rows >= _LEAST_FRESH and batch.segments.fresh
        if self._library is not None and batch.planned_sms != sms:
            self._library.plan(batch.segments, sms, fresh=fresh)
            batch.planned_sms = sms
        if batch.whole is not None:
            batch.whole.replay()
            return
        kind = _LAYER_KINDS[bool(batch.size.decode_rows), fresh]
        graphs = [self.graphs.get(GraphKey(kind, batch.rows, sms, layer)) for layer in range(first, end)]
        if None in graphs:
            context = self._context(batch.rows, sms, self._parts(kind, sms))
            self._model.run_layers(self.workspace.hidden[: batch.rows], first, end, context, self._cache)
            return
        for graph in graphs:
            assert graph is not None
            graph.replay()

    def _begin_decode(self, sms: int) -> None:
        seats, own = self._seats.device, self._in
        begin_decode(
            own.decode_rows, own.live_rows, own.first_row, seats, self._cache.block_size, own.ids, own.positions,
            own.slots,
        )  # fmt: skip
        self._attention.schedule(own.decode_rows, seats.lengths, own.live_rows, own.first_row, sms)

    def _parts(self, kind: str, sms: int) -> tuple[AttentionPart, ...]:
        """The attention of a kind of step or layer."""
        tables = self._seats.device.tables
        prompts: AttentionPart = PrefillPart(self._segments, tables, sms, self._model.shape.sliding_window)
        if self._library is not None:
            prompts = self._library.part(fresh=kind == "fresh layer")
        return (prompts, DecodePart(self._attention, tables)) if kind.startswith("mixed") else (prompts,)

    def _context(
        self, tokens: int, sms: int, parts: tuple[AttentionPart, ...], *, capturing: bool = False
    ) -> CudaStepContext:
        positions, slots = self._in.positions[:tokens], self._in.slots[:tokens]
        return CudaStepContext(sms, capturing, self.workspace, positions, slots, parts)

    def _draw(self, launch: Launch, size: BatchSize, sms: int) -> Drawn:
        drawn = Drawn()
        runs = self._seats.ruled.prompt_runs(launch.parts)
        if runs:
            self._tell_of_prompts(runs, launch, sms, drawn)
        if not size.sampled:
            return drawn
        bucket = bucket_of(self._row_buckets, size.sampled)
        assert bucket is not None, "more rows sampled than there are seats"
        graph = self.graphs.get(GraphKey("tail", bucket, sms))
        if graph is not None:
            graph.replay()
        else:
            self._tail_work(bucket, sms, capturing=False)
        if masked := masked_rows(launch):
            self._tail.redraw_masked(masked, sms)
        ruled = self._seats.ruled.drawn(launch.parts, launch.rows, self._seats.length)
        if ruled:
            self._tail.redraw(ruled, sms, drawn)
        drawn.tokens = self._return.fetch(self._tail.tokens[: size.sampled])
        return drawn

    def _tell_of_prompts(self, runs: Sequence[PromptRun], launch: Launch, sms: int, drawn: Drawn) -> None:
        rows = self._piece_rows
        context = self._context(rows, sms, ())
        for whole in runs:
            prompt = self._seats.prompt(launch.parts[whole.part].seat)
            for run in whole.pieces(rows):
                hidden = self.workspace.hidden[run.row : run.row + run.end - run.first]
                targets = to_device(prompt[run.first : run.end].astype(np.int64), hidden.device)
                drawn.prompts.append((run, self._tail.of_prompt(hidden, targets, run.most, context, rows)))

    # --- graphs -----------------------------------------------------------------------------------------------

    def captures(self) -> Iterator[GraphKey]:
        """See `CapturedSteps`. All but "tail", which is sized by sampled rows, are sized by tokens."""
        total = self._lattice.total_sms
        for sms in sorted(self._lattice.prefill_shares):
            mixes = (False, True) if sms == total else (False,)
            for tokens in reversed(self._layer_buckets):
                kinds = [_LAYER_KINDS[mixed, False] for mixed in mixes]
                if self._library is not None and tokens >= _LEAST_FRESH:
                    kinds.append(_LAYER_KINDS[False, True])
                yield from (GraphKey(kind, tokens, sms, layer) for kind in kinds for layer in range(self.layers))
            for tokens in reversed(self._token_buckets):
                yield from (GraphKey("mixed" if mixed else "prefill", tokens, sms) for mixed in mixes)
            for rows in reversed(self._row_buckets):
                if sms == total or rows <= _MOST_SAMPLED_ON_A_SHARE:
                    yield GraphKey("tail", rows, sms)

    def work(self, key: GraphKey, layers: int) -> None:
        """See `CapturedSteps`."""
        kind, count, sms, layer = key
        if kind == "tail":
            self._tail_work(count, sms, capturing=True)
            return
        context = self._context(count, sms, self._parts(kind, sms), capturing=True)
        if layer >= 0:
            hidden = self.workspace.hidden[:count]
            self._model.run_layers(hidden, layer, layer + 1, context, self._cache)
            return
        if kind == "mixed":
            self._begin_decode(sms)
        hidden = self._model.embed(self._in.ids[:count], context)
        self._model.run_layers(hidden, 0, layers, context, self._cache)

    def _tail_work(self, rows: int, sms: int, *, capturing: bool) -> None:
        own, space = self._in, self.workspace
        sampled = space.sampled[:rows]
        gather_rows(space.hidden, own.at[:rows], own.live_samples, sampled)
        context = self._context(rows, sms, (), capturing=capturing)
        self._tail.draw(sampled, own.sample_seats[:rows], own.live_samples, own.new_lengths[:rows], context)

    def warm_rules(self, sms: int) -> None:
        """See `CapturedSteps`."""
        self._tail.warm(sms)
        hidden = self.workspace.hidden[:1]
        target = torch.zeros(1, dtype=torch.int64, device=hidden.device)
        context = self._context(self._piece_rows, sms, ())
        self._tail.of_prompt(hidden, target, MOST_LOGPROBS, context, self._piece_rows)

    def warm_masks(self, sms: int) -> None:
        """See `CapturedSteps`."""
        self._tail.warm_masks(sms)

    def pad(self) -> None:
        """Let the inputs be padding only, and all attention planned, as captures and warm-ups want them."""
        self._in.clear()
        self._begin_decode(self._lattice.total_sms)
        if self._library is not None:
            nothing = np.zeros(0, dtype=np.int32)
            segments = SegmentArrays(np.zeros(1, dtype=np.int32), nothing, nothing)
            self._library.plan(segments, self._lattice.total_sms, fresh=False)

    def warm(self, stream: torch.cuda.Stream, sms: int, tokens: int, longest: int) -> None:
        """Compile and load what an eager step of `tokens` tokens needs, by running one layer of one.

        Its prompts, of at most `longest` tokens, sit on the padding seat, whose only block is no request's.
        """
        self._updater.warm()
        spare = self._seats.max_seqs
        self._seats.give_padding(longest)
        tokens = min(tokens, longest * MAX_BATCH_PROMPTS)  # short contexts make no larger batch
        parts = [PromptPart(spare, 0, min(longest, tokens - at), False) for at in range(0, tokens, longest)]
        ranges = tuple((part.start, part.end) for part in parts)
        group = PrefillGroup((), ranges, (0, 1), sms)
        with torch.cuda.stream(stream):
            self.run(Launch(0, group, parts=tuple(parts)), None)
        self._batch = None


_MOST_SAMPLED_ON_A_SHARE = 32

_LEAST_FRESH = 1024
"""From so many rows on it pays to read a fresh batch's K and V from its own rows."""

_LAYER_KINDS = {(False, False): "layer", (False, True): "fresh layer", (True, False): "mixed layer"}
"""What the graph of one layer is called: (with decode rows, fresh)."""
