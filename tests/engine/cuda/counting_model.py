"""A model that can be had on fake streams: what a step writes and reads is real, its arithmetic is a hash of tokens.

The steps under test are the engine's own, host side and order of launches; only kernels are replaced, by numpy that
runs in the stream the kernel would run in, when its turn comes. Keys and values are token ids, and the token after a
sequence is a hash of all that lies in its blocks: whoever reads too early, or writes where it should not, changes an
answer.
"""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from bulletserve.core.partition import Lattice
from bulletserve.core.plan import Lane
from bulletserve.core.shapes import ModelShape
from bulletserve.engine.cuda import batch_inputs, batch_steps, decode_steps, seat_tables
from bulletserve.engine.cuda.attention import PrefillPart
from bulletserve.engine.cuda.batch_steps import BatchSteps
from bulletserve.engine.cuda.decode_steps import DecodeSteps
from bulletserve.engine.cuda.executor import CudaExecutor
from bulletserve.engine.cuda.seat_tables import CudaSeats
from bulletserve.kernels.token_rules import TokenHistory
from tests.engine.cuda.fake_cuda import FakeStream, current_stream, pretend_cuda
from tests.engine.cuda.stand_ins import WorkGraph, WorkGraphs

LAYERS, VOCABULARY, BLOCK_SIZE = 3, 97, 4
SHAPE = ModelShape("llama", LAYERS, 8, 8, 1, 1, 8, VOCABULARY, 400)
CPU = torch.device("cpu")


def next_token(tokens: Sequence[int]) -> int:
    """What follows a sequence."""
    state = 7
    for token in tokens:
        state = (state * 31 + int(token) + 1) % 1000003
    return state % VOCABULARY


def later(work) -> None:
    current_stream().put(work)


class StreamRing:
    """`PinnedRing` whose copy happens in the stream."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.device_words = torch.zeros(words, dtype=torch.int32)
        self._host = np.zeros(words, dtype=np.int32)

    def take(self):
        self._host[:] = -123456
        return self._host

    def send(self, words: int) -> None:
        sent, there = self._host[:words].copy(), self.device_words.numpy()

        def copy() -> None:
            there[:words] = sent

        later(copy)


class StreamReturn:
    """`TokenReturn` whose copy happens in the stream."""

    def __init__(self, rows: int) -> None:
        pass

    def fetch(self, tokens: Tensor):
        host, there = np.full(len(tokens), -1, dtype=np.int32), tokens.numpy()

        def copy() -> None:
            host[:] = there

        later(copy)
        return host


class Kernel:
    """Decode attention: remembers which rows were scheduled, when the stream gets there."""

    def schedule(self, rows: Tensor, lengths: Tensor, live: Tensor, first_row: Tensor, sms: int) -> None:
        def plan() -> None:
            count = int(live[0])
            self.first, self.seats = int(first_row[0]), rows.numpy()[:count].copy()
            self.contexts = lengths.numpy()[self.seats] + 1

        later(plan)


class Model:
    """`Decoder` by its methods; `kv` holds a token per place."""

    def __init__(self, blocks: int) -> None:
        self.shape, self.device = SHAPE, CPU
        self.kv = np.full(blocks * BLOCK_SIZE, -1, dtype=np.int64)

    def embed(self, ids: Tensor, context) -> Tensor:
        hidden = context.workspace.hidden[: len(ids)]

        def work() -> None:
            hidden.numpy()[:, 0] = ids.numpy()

        later(work)
        return hidden

    def run_layers(self, hidden: Tensor, first: int, last: int, context, cache) -> Tensor:
        for layer in range(first, last):
            later(partial(self._layer, hidden.numpy(), layer, context))
        return hidden

    def _layer(self, hidden, layer: int, context) -> None:
        if layer == 0:
            slots = context.slots.numpy()
            self.kv[slots[slots >= 0]] = hidden[slots >= 0, 0]
        if layer < LAYERS - 1:
            return
        for part in context.attention:
            tables = part.tables.numpy()
            if not isinstance(part, PrefillPart):
                for row, (seat, tokens) in enumerate(zip(part.kernel.seats, part.kernel.contexts, strict=True)):
                    hidden[part.kernel.first + row, 0] = self._read(tables[seat], tokens)
                continue
            segments = part.segments
            for i in range(int(segments.count[0])):
                row, tokens = int(segments.starts[i + 1]) - 1, int(segments.context[i])
                hidden[row, 0] = self._read(tables[int(segments.seat[i])], tokens)

    def _read(self, table, tokens: int) -> int:
        position = np.arange(tokens)
        return next_token(self.kv[table[position // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + position % BLOCK_SIZE])


class HashTail:
    """`Tail`: the hash is the token already. A decode step's lengths are those on the device and one more."""

    def __init__(self, model: Model, seats: CudaSeats, workspace, max_rows: int) -> None:
        self._seats, self._workspace = seats.device, workspace
        self.tokens = torch.zeros(max_rows, dtype=torch.int32)

    def draw(self, hidden: Tensor, rows: Tensor, live: Tensor, lengths: Tensor, context) -> None:
        def work() -> None:
            count = int(live[0])
            seats = rows.numpy()[:count]
            self.tokens.numpy()[:count] = hidden.numpy()[:count, 0]
            self._seats.last_token.numpy()[seats] = hidden.numpy()[:count, 0]
            table = self._seats.lengths.numpy()
            table[seats] = lengths.numpy()[:count] if self._workspace.batch else table[seats] + 1

        later(work)


def apply_updates(updates: Tensor, pairs: int, seat_records: int, seats) -> None:
    def work() -> None:
        words = updates.numpy()
        cells = words[2 : 2 + 2 * words[0]].reshape(-1, 2)
        seats.tables.numpy().reshape(-1)[cells[:, 0]] = cells[:, 1]
        for record in words[2 + 2 * pairs :][: 7 * words[1]].reshape(-1, 7):
            seats.lengths.numpy()[record[0]] = record[1]

    later(work)


def begin_decode(rows, live, first_row, seats, block_size, ids, positions, slots) -> None:
    def work() -> None:
        count, first = int(live[0]), int(first_row[0])
        places = slice(first, first + len(rows))
        ids.numpy()[places], positions.numpy()[places], slots.numpy()[places] = -1, 0, -1
        seat = rows.numpy()[:count]
        position = seats.lengths.numpy()[seat].astype(np.int64)
        places = slice(first, first + count)
        ids.numpy()[places] = seats.last_token.numpy()[seat]
        positions.numpy()[places] = position
        slots.numpy()[places] = (
            seats.tables.numpy()[seat, position // block_size].astype(np.int64) * block_size + position % block_size
        )

    later(work)


def gather_rows(hidden: Tensor, at: Tensor, live: Tensor, out: Tensor) -> None:
    def work() -> None:
        count = int(live[0])
        out.numpy()[:count] = hidden.numpy()[at.numpy()[:count]]

    later(work)


def counting_executor(monkeypatch: pytest.MonkeyPatch, lattice: Lattice, blocks: int, seqs: int, poster):
    """A GPU executor over `blocks` blocks (and block 0) for `seqs` requests, and its streams, to be ended."""
    pretend_cuda(monkeypatch)
    steps = {
        "begin_decode": begin_decode,
        "TokenReturn": StreamReturn,
        "StepGraphs": WorkGraphs,
        "Tail": HashTail,
        "decode_attention": lambda *_: Kernel(),
    }
    for module, names in {
        batch_inputs: {"PinnedRing": StreamRing},
        seat_tables: {"PinnedRing": StreamRing, "apply_updates": apply_updates},
        decode_steps: {"PinnedRing": StreamRing, "apply_updates": apply_updates, **steps},
        batch_steps: {"gather_rows": gather_rows, **steps},
    }.items():
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    tokens = 4096 + seqs

    def workspace(*, batch: bool) -> SimpleNamespace:
        hidden, attended, sampled = (torch.zeros((n, 1), dtype=torch.int64) for n in (tokens, tokens, seqs))
        return SimpleNamespace(hidden=hidden, attended=attended, sampled=sampled, batch=batch)

    model = Model(blocks + 1)
    cache = SimpleNamespace(block_size=BLOCK_SIZE, layers=[])
    seats = CudaSeats(seqs, blocks + 1, TokenHistory(seqs + 1, 1, CPU), CPU)
    rows = tuple(n for n in (1, 2, 4, 8, 16) if n < seqs) + (seqs,)
    decode = DecodeSteps(model, cache, seats, workspace(batch=False), lattice, rows)  # type: ignore[arg-type]
    batch = BatchSteps(
        model, cache, seats, workspace(batch=True), lattice, max_tokens=tokens, token_buckets=(4, 8),  # type: ignore[arg-type]
        layer_buckets=(12, 20), row_buckets=rows, library=None,
    )  # fmt: skip
    for lane in (decode, batch):
        for key in lane.captures():
            lane.graphs[key] = WorkGraph(partial(lane.work, key, LAYERS))  # type: ignore[index]
    shares = {(Lane.PREFILL, sms): FakeStream(f"prefill {sms}") for sms in lattice.prefill_shares}
    shares |= {(Lane.DECODE, sms): FakeStream(f"decode {sms}") for sms in lattice.decode_shares}
    manager = SimpleNamespace(lattice=lattice, stream=lambda *key: shares[key], close=lambda: None)
    return CudaExecutor(manager, cache, seats, batch, decode, CPU, poster), tuple(shares.values())  # type: ignore[arg-type]
