"""The seats of an engine: per running request, one row of every table that steps read.

Knows nothing about scheduling. A row changes only when its request takes the seat, when a block is appended (a place
no started step reads yet) and when its own steps run, so two lanes can work on different rows at once.
"""

import torch
from torch import Tensor

from bulletserve.core.launch import Launch, Seat
from bulletserve.engine.ruled_seats import RuledSeats
from bulletserve.kernels.sampling import SamplingRows
from bulletserve.kernels.token_rules import TokenHistory


class SeatTable:
    """Tables for `max_seqs` requests of at most `max_blocks` blocks, on the model's device.

    tables int64 [max_seqs, max_blocks]: cache blocks in order. lengths int64 [max_seqs]: tokens in the cache.
    last_token int64 [max_seqs]: the token that the next decode step reads. ruled, history: what those with rules for
    their tokens need.
    """

    def __init__(self, max_seqs: int, max_blocks: int, vocab_size: int, device: torch.device) -> None:
        self.ruled = RuledSeats()
        self.history = TokenHistory(max_seqs, vocab_size, device)
        self.tables = torch.zeros((max_seqs, max_blocks), dtype=torch.int64, device=device)
        self.lengths = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self._temperature = torch.zeros(max_seqs, dtype=torch.float32, device=device)
        self._top_p = torch.ones(max_seqs, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self._seed = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self._tokens: list[Tensor | None] = [None] * max_seqs
        self._blocks = [0] * max_seqs
        self._device = device

    def prepare(self, launch: Launch) -> None:
        """Let a launch's seats and blocks take effect. Called by the thread that starts steps."""
        for seat in launch.seats:
            self._take(seat)
        for seat in self.ruled.prepare(launch):
            assert seat.rules is not None
            self.history.take(seat.seat, seat.rules, seat.token_ids, seat.prompt_tokens)
        for row, block in launch.blocks:
            self.tables[row, self._blocks[row]] = block
            self._blocks[row] += 1

    def prompt_tokens(self, seat: int, start: int, end: int) -> Tensor:
        """Tokens of a seat's prompt, int64 [end - start]."""
        tokens = self._tokens[seat]
        assert tokens is not None, "a prompt part names a seat that nobody took"
        return tokens[start:end]

    def sampling(self, rows: Tensor, position: Tensor) -> SamplingRows:
        """How the seats `rows` int64 [R] draw the token at `position` int64 [R]."""
        return SamplingRows(self._temperature[rows], self._top_p[rows], self._top_k[rows], self._seed[rows], position)

    def _take(self, seat: Seat) -> None:
        row = seat.seat
        self.tables[row, : len(seat.blocks)] = torch.tensor(seat.blocks, dtype=torch.int64)
        self._blocks[row] = len(seat.blocks)
        self.lengths[row] = seat.cached_tokens
        self._tokens[row] = torch.tensor(seat.token_ids, dtype=torch.int64, device=self._device)
        self._temperature[row] = seat.temperature
        self._top_p[row] = seat.top_p
        self._top_k[row] = seat.top_k
        self._seed[row] = seat.seed
