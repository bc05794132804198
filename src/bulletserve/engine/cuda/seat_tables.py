"""The seats of a GPU engine: per running request one row of every table that steps read, on the device and here.

Knows nothing about scheduling. The host's copy of block tables and lengths serves prefill, whose places are computed
here; the device's serves decode, which reads and advances its rows by itself, so that a step in a captured graph needs
nothing from the host. Only what changed travels: a `SeatUpdate` goes with the step that first needs it. A row changes
only when its request takes the seat, when a block is appended (a place no started step reads yet) and when its own
steps run, so two lanes can work on different rows at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from bulletserve.core.launch import Launch, PromptPart, Seat
from bulletserve.engine.cuda.pinned_ring import PinnedRing
from bulletserve.engine.ruled_seats import RuledSeats
from bulletserve.kernels.cuda.step_tables import (
    HEADER_WORDS,
    PAIR_WORDS,
    SEAT_WORDS,
    SeatTables,
    apply_updates,
    update_words,
)
from bulletserve.kernels.token_rules import TokenHistory, always_matter

_PAIRS = 2048
_RECORDS = 64
"""Changes that one launch carries; more than that take several."""

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SeatUpdate:
    """Changes of the device's tables: cells of `tables` as (flat index, block), seats taken, and those with rules."""

    cells: list[tuple[int, int]]
    seats: Sequence[Seat]
    ruled: Sequence[Seat] = ()


class CudaSeats:
    """Tables for `max_seqs` requests of at most `max_blocks` blocks. Row `max_seqs` is padding: no tokens, block 0.

    `device` holds the tables that steps read; `host_tables` and `host_lengths` are this side's copies of two of them.
    ruled, history: what those with rules for their tokens need. A row of which every token is drawn again is a greedy
    one in `device`, because that is drawn quickest; `ruled_device` are the same tables with its own temperature.
    """

    def __init__(self, max_seqs: int, max_blocks: int, history: TokenHistory, device: torch.device) -> None:
        rows = max_seqs + 1
        self.max_seqs = max_seqs
        self.max_blocks = max_blocks
        self.device = SeatTables(
            tables=torch.zeros((rows, max_blocks), dtype=torch.int32, device=device),
            lengths=torch.zeros(rows, dtype=torch.int32, device=device),
            last_token=torch.zeros(rows, dtype=torch.int32, device=device),
            temperature=torch.zeros(rows, dtype=torch.float32, device=device),
            top_p=torch.ones(rows, dtype=torch.float32, device=device),
            top_k=torch.zeros(rows, dtype=torch.int32, device=device),
            seed=torch.zeros(rows, dtype=torch.int64, device=device),
        )
        self.ruled_device = replace(self.device, temperature=torch.zeros_like(self.device.temperature))
        self.ruled = RuledSeats()
        self.history = history
        self.host_tables: Words = np.zeros((rows, max_blocks), dtype=np.int32)
        self.host_lengths: Words = np.zeros(rows, dtype=np.int32)
        self._blocks = [0] * rows
        self._taken: list[Seat | None] = [None] * rows
        self._arrays: list[Words | None] = [None] * rows

    def prepare(self, launch: Launch) -> SeatUpdate | None:
        """Take in a launch's seats and blocks here, and say what the device must hear. By the thread that starts."""
        if not (launch.seats or launch.blocks):
            return None
        cells: list[tuple[int, int]] = []
        width = self.max_blocks
        ruled = self.ruled.prepare(launch)
        for seat in launch.seats:
            row, count = seat.seat, len(seat.blocks)
            self.host_tables[row, :count] = seat.blocks
            self.host_lengths[row] = seat.cached_tokens
            self._blocks[row] = count
            self._taken[row] = seat
            self._arrays[row] = None
            cells.extend(zip(range(row * width, row * width + count), seat.blocks, strict=True))
        for row, block in launch.blocks:
            at = self._blocks[row]
            self.host_tables[row, at] = block
            cells.append((row * width + at, block))
            self._blocks[row] = at + 1
        return SeatUpdate(cells, launch.seats, ruled)

    def prompt(self, seat: int) -> Words:
        """All prompt tokens of a seat, int32."""
        tokens = self._arrays[seat]
        if tokens is None:
            tokens = self._arrays[seat] = np.asarray(self._guest(seat).token_ids, dtype=np.int32)
        return tokens

    def back(self, parts: Sequence[PromptPart]) -> SeatUpdate:
        """What takes the lengths of prompts back to where a step began: what it would have computed is not there."""
        return SeatUpdate([], [self._guest(part.seat)._replace(cached_tokens=part.start) for part in parts])

    def length(self, seat: int) -> int:
        """Tokens of a seat once the steps that have been prepared have run."""
        return int(self.host_lengths[seat])

    def _guest(self, seat: int) -> Seat:
        guest = self._taken[seat]
        assert guest is not None, "a prompt part names a seat that nobody took"
        return guest

    def give_padding(self, tokens: int) -> None:
        """Let the padding row have a prompt of `tokens` tokens, for warm-ups."""
        self._arrays[self.max_seqs] = np.zeros(tokens, dtype=np.int32)


class SeatUpdater:
    """Carries one lane's updates to the device, in its stream's order."""

    def __init__(self, seats: CudaSeats, device: torch.device) -> None:
        self._seats = seats
        self._ring = PinnedRing(update_words(_PAIRS, _RECORDS), device)

    def apply(self, update: SeatUpdate | None) -> None:
        """Queue an update on the current stream; most steps have none or a few cells."""
        if update is None:
            return
        cells, seats = update.cells, list(update.seats)
        while cells or seats:
            self._send(cells[:_PAIRS], seats[:_RECORDS])
            cells, seats = cells[_PAIRS:], seats[_RECORDS:]
        for seat in update.ruled:
            assert seat.rules is not None
            self._seats.history.take(seat.seat, seat.rules, seat.token_ids, seat.prompt_tokens)
            self._seats.ruled_device.temperature[seat.seat] = seat.temperature

    def _send(self, cells: list[tuple[int, int]], seats: list[Seat]) -> None:
        words = self._ring.take()
        end = fill_updates(words, 0, cells)
        words[1] = len(seats)
        at = HEADER_WORDS + PAIR_WORDS * _PAIRS
        for seat in seats:
            words[at : at + SEAT_WORDS] = _record(seat)
            at += SEAT_WORDS
        self._ring.send(at if seats else end)
        apply_updates(self._ring.device_words, _PAIRS, _RECORDS, self._seats.device)

    def warm(self) -> None:
        """Compile what an update needs."""
        self._send([], [])


def fill_updates(words: Words, at: int, cells: list[tuple[int, int]]) -> int:
    """Write changed cells, and no seats, as `apply_updates` reads them, from word `at` on; the word after them."""
    words[at], words[at + 1] = len(cells), 0
    first = at + HEADER_WORDS
    end = first + PAIR_WORDS * len(cells)
    if cells:
        words[first:end] = np.array(cells, dtype=np.int32).ravel()
    return end


def _record(seat: Seat) -> Words:
    record = np.empty(SEAT_WORDS, dtype=np.int32)
    record[0], record[1], record[4] = seat.seat, seat.cached_tokens, seat.top_k
    redrawn = seat.rules is not None and always_matter(seat.rules)
    temperature = 0.0 if redrawn else seat.temperature
    record[2:4] = np.array([temperature, seat.top_p], dtype=np.float32).view(np.int32)
    record[5:7] = np.array([seat.seed], dtype=np.uint64 if seat.seed >= 1 << 63 else np.int64).view(np.int32)
    return record
