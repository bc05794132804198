"""What the prefill lane's steps read: one row of words per step, built on the host and sent in one copy.

Knows nothing about kernels. Prompt rows come first, decode rows after them, padding last. Everything that varies
between steps of one bucket is in here, at fixed places, so that captured graphs can read it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bulletserve.core.errors import EngineError
from bulletserve.core.launch import Launch
from bulletserve.core.snapshot import MAX_BATCH_PROMPTS
from bulletserve.engine.cuda.pinned_ring import PinnedRing
from bulletserve.engine.cuda.seat_tables import CudaSeats, Words

_HEADER = 4  # first decode row, decode rows, sampled rows, nothing

_SEGMENT_CUTS = [MAX_BATCH_PROMPTS + 1, 2 * MAX_BATCH_PROMPTS + 1, 3 * MAX_BATCH_PROMPTS + 1]


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How much a step holds: rows of prompts, decode rows, rows that draw a token, and prompts."""

    prompt_tokens: int
    decode_rows: int
    sampled: int
    segments: int

    @property
    def tokens(self) -> int:
        """All rows of the batch."""
        return self.prompt_tokens + self.decode_rows


@dataclass(frozen=True, slots=True)
class SegmentArrays:
    """The prompts of a step on the host: starts int32 [S + 1], context int32 [S], seat int32 [S]."""

    starts: Words
    context: Words
    seat: Words

    @property
    def fresh(self) -> bool:
        """Whether no prompt has earlier tokens in the cache."""
        return bool(np.array_equal(self.context, np.diff(self.starts)))


class BatchInputs:
    """Steps of up to `max_tokens` rows over `seats`; all tensors are views of one device buffer.

    first_row, live_rows, live_samples int32 [1]. segments: as `PrefillSegments` packs them. Per sampled row: at (batch
    row), sample_seats, new_lengths int32 [R]. decode_rows int32 [R]: seats. Per batch row: ids, positions int32 [T],
    slots int64 [T].
    """

    def __init__(self, seats: CudaSeats, max_tokens: int, block_size: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self._seats = seats
        self._block_size = block_size
        # Positions in a sequence, and rows of a batch, which may hold more of them than one sequence has.
        self._arange = np.arange(max(seats.max_blocks * block_size, max_tokens) + 1, dtype=np.int32)
        most = seats.max_seqs
        sizes = {
            "header": _HEADER,
            "segments": 3 * MAX_BATCH_PROMPTS + 2,
            "at": most,
            "sample_seats": most,
            "new_lengths": most,
            "decode_rows": most,
            "ids": max_tokens,
            "positions": max_tokens,
            "slots": 2 * max_tokens,
        }
        self._places: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self._places[name] = slice(end, end + size)
            end += size + size % 2  # every array starts at 8 bytes: slots are int64
        self._ring = PinnedRing(end, device)
        self._words = end
        words = self._ring.device_words
        self.first_row, self.live_rows, self.live_samples = (words[i : i + 1] for i in range(3))
        self.segments = self._view("segments")
        self.at, self.sample_seats = self._view("at"), self._view("sample_seats")
        self.new_lengths, self.decode_rows = self._view("new_lengths"), self._view("decode_rows")
        self.ids, self.positions = self._view("ids"), self._view("positions")
        self.slots = self._view("slots").view(torch.int64)

    def _view(self, name: str) -> Tensor:
        return self._ring.device_words[self._places[name]]

    def send(self, launch: Launch, size: BatchSize, bucket: int | None) -> SegmentArrays:
        """Build the words of a step of this `size` and queue their copy; rows up to `bucket` become padding.

        Raises `EngineError` for a step that is too large.
        """
        room = self.max_tokens - self._seats.max_seqs
        if size.prompt_tokens > room or size.segments > MAX_BATCH_PROMPTS:
            raise EngineError(
                f"a step of {size.prompt_tokens} tokens of {size.segments} prompts, where the engine has room for "
                f"{room} of {MAX_BATCH_PROMPTS}"
            )
        words = self._ring.take()
        part = {name: words[place] for name, place in self._places.items()}
        part["header"][:] = size.prompt_tokens, size.decode_rows, size.sampled, 0
        starts, part["context"], part["seat"], count = np.split(part["segments"], _SEGMENT_CUTS)
        part["starts"], count[0] = starts, size.segments
        self._fill_prompts(part, launch)
        self._fill_samples(part, launch, size)
        padded = slice(size.tokens, max(size.tokens, bucket or 0))
        part["ids"][padded], part["positions"][padded] = -1, 0
        part["slots"].view(np.int64)[padded] = -1
        self._ring.send(self._words)
        used = size.segments
        return SegmentArrays(starts[: used + 1].copy(), part["context"][:used].copy(), part["seat"][:used].copy())

    def clear(self) -> None:
        """Padding only, as warm-ups and captures want it."""
        words = self._ring.take()
        words[:] = 0
        words[self._places["ids"]] = -1
        words[self._places["slots"]].view(np.int64)[:] = -1
        for name in ("sample_seats", "decode_rows"):
            words[self._places[name]] = self._seats.max_seqs
        self._ring.send(self._words)

    @staticmethod
    def measure(launch: Launch) -> BatchSize:
        """The size of a step."""
        tokens = sum(part.end - part.start for part in launch.parts)
        rows = len(launch.rows)
        return BatchSize(tokens, rows, rows + sum(part.samples for part in launch.parts), len(launch.parts))

    def _fill_prompts(self, part: dict[str, Words], launch: Launch) -> None:
        seats, size = self._seats, self._block_size
        slots = part["slots"].view(np.int64)
        starts, start = part["starts"], 0
        starts[0] = 0
        for index, piece in enumerate(launch.parts):
            stop = start + piece.end - piece.start
            positions = self._arange[piece.start : piece.end]
            part["ids"][start:stop] = seats.prompt(piece.seat)[piece.start : piece.end]
            part["positions"][start:stop] = positions
            slots[start:stop] = seats.host_tables[piece.seat, positions // size]
            slots[start:stop] *= size
            slots[start:stop] += positions % size
            starts[index + 1] = stop
            part["context"][index], part["seat"][index] = piece.end, piece.seat
            start = stop

    def _fill_samples(self, part: dict[str, Words], launch: Launch, size: BatchSize) -> None:
        """Prompts that end first, then decode rows; the rest is the padding seat."""
        at, seat, lengths = part["at"], part["sample_seats"], part["new_lengths"]
        host, index = self._seats.host_lengths, 0
        for piece, stop in zip(launch.parts, part["starts"][1:], strict=False):
            if piece.samples:
                at[index], seat[index], lengths[index] = stop - 1, piece.seat, piece.end
                host[piece.seat] = piece.end
                index += 1
        if launch.rows:
            rows = np.asarray(launch.rows, dtype=np.int32)
            part["decode_rows"][: len(rows)] = rows
            host[rows] += 1
            at[index : size.sampled] = self._arange[size.prompt_tokens : size.tokens]
            seat[index : size.sampled] = rows
            lengths[index : size.sampled] = host[rows]
        part["decode_rows"][size.decode_rows :] = self._seats.max_seqs
        at[size.sampled :] = 0
        seat[size.sampled :] = self._seats.max_seqs
        lengths[size.sampled :] = 0
