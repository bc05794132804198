"""The decode lane's steps: one token more for every row, from one graph per (batch bucket, share).

Knows nothing about threads. A step takes in the blocks that were appended to its rows, reads its rows' last tokens and
lengths from the seats' tables and advances them there, so step n+1 can be queued before step n has run, and the device
never waits for Python between them.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from bulletserve.core.errors import EngineError
from bulletserve.core.launch import Launch
from bulletserve.core.partition import Lattice
from bulletserve.engine.cuda.attention import DecodePart, decode_attention
from bulletserve.engine.cuda.buckets import bucket_of
from bulletserve.engine.cuda.cuda_graphs import GraphKey, StepGraphs
from bulletserve.engine.cuda.pinned_ring import PinnedRing, TokenReturn
from bulletserve.engine.cuda.seat_tables import CudaSeats, SeatUpdate, SeatUpdater, Words, fill_updates
from bulletserve.engine.cuda.tail import Tail
from bulletserve.engine.drawn import Drawn
from bulletserve.engine.kv_cache import KvCache
from bulletserve.engine.masked import masked_rows
from bulletserve.kernels.cuda.step_tables import apply_updates, begin_decode, update_words
from bulletserve.models.cuda_operators import CudaStepContext, LaneWorkspace
from bulletserve.models.decoder import Decoder

_HEADER = 4  # words before the rows: first row (0), live rows


class DecodeSteps:
    """Queues decode steps of up to `buckets[-1]` rows on the current stream."""

    def __init__(
        self,
        model: Decoder,
        cache: KvCache,
        seats: CudaSeats,
        workspace: LaneWorkspace,
        lattice: Lattice,
        buckets: Sequence[int],
    ) -> None:
        shape, device, most = model.shape, model.device, buckets[-1]
        self._model, self._cache, self._seats, self.workspace = model, cache, seats, workspace
        self.layers = shape.num_layers
        self._shares = sorted(lattice.decode_shares)
        self._buckets = buckets
        self._ring = PinnedRing(_HEADER + most + update_words(most, 0), device)
        words = self._ring.device_words
        self._first_row, self._live, self._rows = words[0:1], words[1:2], words[_HEADER : _HEADER + most]
        self._updates = words[_HEADER + most :]
        self._ids, self._positions, self._lengths = torch.zeros((3, most), dtype=torch.int32, device=device)
        self._slots = torch.zeros(most, dtype=torch.int64, device=device)
        self._updater = SeatUpdater(seats, device)
        self._attention = decode_attention(shape, cache, seats, lattice.total_sms)
        self._tail = Tail(model, seats, workspace, most)
        self._return = TokenReturn(most)
        self._known: tuple[int, ...] = ()
        self._host_rows: Words = np.zeros(0, dtype=np.int32)
        self.graphs = StepGraphs()

    def run(self, launch: Launch, update: SeatUpdate | None) -> Drawn:
        """Queue one step; what it draws will lie on the host."""
        count = len(launch.rows)
        bucket = bucket_of(self._buckets, count)
        graph = self.graphs.get(GraphKey("decode", bucket or 0, launch.step.sms))
        if graph is None:
            raise EngineError(f"no decode graph for {count} rows on {launch.step.sms} SMs")
        cells = update.cells if update is not None else []
        if update is not None and (update.seats or len(cells) > self._buckets[-1]):  # the graph takes in a block a row
            self._updater.apply(update)
            cells = []
        self._send(launch.rows, cells)
        graph.replay()
        self._seats.host_lengths[self._host_rows] += 1
        drawn = Drawn()
        if masked := masked_rows(launch):
            self._tail.redraw_masked(masked, launch.step.sms)
        ruled = self._seats.ruled.drawn((), launch.rows, self._seats.length)
        if ruled:
            self._tail.redraw(ruled, launch.step.sms, drawn)
        drawn.tokens = self._return.fetch(self._tail.tokens[:count])
        return drawn

    def give_up(self, launch: Launch, update: SeatUpdate | None) -> None:
        """See `LaneSteps`."""
        self._updater.apply(update)

    def captures(self) -> Iterator[GraphKey]:
        """See `CapturedSteps`."""
        for sms in self._shares:
            for bucket in reversed(self._buckets):
                yield GraphKey("decode", bucket, sms)

    def work(self, key: GraphKey, layers: int) -> None:
        """See `CapturedSteps`."""
        bucket, sms = key.size, key.sms
        seats = self._seats.device
        rows, ids = self._rows[:bucket], self._ids[:bucket]
        positions, slots, lengths = self._positions[:bucket], self._slots[:bucket], self._lengths[:bucket]
        apply_updates(self._updates, self._buckets[-1], 0, seats)
        begin_decode(
            rows, self._live, self._first_row, seats, self._cache.block_size, ids, positions, slots
        )  # fmt: skip
        torch.add(positions, 1, out=lengths)
        self._attention.schedule(rows, seats.lengths, self._live, self._first_row, sms)
        part = DecodePart(self._attention, seats.tables)
        context = CudaStepContext(sms, True, self.workspace, positions, slots, (part,))
        hidden = self._model.embed(ids, context)
        hidden = self._model.run_layers(hidden, 0, layers, context, self._cache)
        self._tail.draw(hidden, rows, self._live, lengths, context)

    def warm_rules(self, sms: int) -> None:
        """See `CapturedSteps`."""
        self._tail.warm(sms)

    def warm_masks(self, sms: int) -> None:
        """See `CapturedSteps`."""
        self._tail.warm_masks(sms)

    def pad(self) -> None:
        """Let the rows be padding only, as captures and warm-ups want them."""
        self._send((), [])

    def _send(self, rows: tuple[int, ...], cells: list[tuple[int, int]]) -> None:
        """One copy: the rows and the blocks that were appended to them, at most one each."""
        words = self._ring.take()
        count, most = len(rows), self._buckets[-1]
        if rows is not self._known:  # the same tuple while nobody joins or leaves
            self._known, self._host_rows = rows, np.array(rows, dtype=np.int32)
        words[0], words[1] = 0, count
        words[_HEADER : _HEADER + count] = self._host_rows
        words[_HEADER + count : _HEADER + most] = self._seats.max_seqs
        end = fill_updates(words, _HEADER + most, cells)
        self._ring.send(end)
