"""What the other lane does to a share of the GPU, without the other lane: a load to measure kernels beside.

Knows nothing about lanes or models. A kernel that is fastest alone need not be fastest beside another: the clock falls
as both draw power, and the bandwidth between L2 and the SMs is one for all. Decode looks like a stream of reads, and
prefill like tensor cores at work on tiles that come out of L2. Each load runs until a word in memory says that it is
enough, or for some seconds at most.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

Kind = Literal["reads", "multiplies"]

LOAD_ELEMENTS = 1 << 27  # of 16 bits: several times what L2 holds
_MOST_TURNS = 1 << 16  # each takes some ten microseconds
_READ_WORDS, _READS_AT_ONCE, _READERS_PER_SM = 2048, 2, 8
_READS = 16  # of each turn
_TILE = 128, 256, 64
_DEPTH = 4096  # elements of a row of either factor
_ROW_TILES = 8


@triton.jit
def _goes_on(enough, turns, most):
    """An atomic, because one thread asks for all: if each asked for itself, some could leave a loop before others."""
    return (tl.atomic_add(enough, 0) == 0) & (turns < most)


@triton.jit
def _read(
    enough, words, sums, count, most, WORDS: tl.constexpr, AT_ONCE: tl.constexpr, READS: tl.constexpr
):  # fmt: skip
    """Reads all `count` words again and again, each program its own part of them."""
    first = tl.program_id(0).to(tl.int64) * WORDS
    step = tl.num_programs(0) * WORDS
    at = first
    total = tl.zeros((WORDS,), tl.int32)
    turns = 0
    while _goes_on(enough, turns, most):
        for _ in range(READS):
            for _ in tl.static_range(AT_ONCE):
                total ^= tl.load(words + at + tl.arange(0, WORDS))
                at = tl.where(at + step + WORDS > count, first, at + step)
        turns += 1
    tl.store(sums + tl.program_id(0), tl.max(total, 0))


@triton.jit
def _multiply(
    enough, left, right, sums, right_tiles, most,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, ROW_TILES: tl.constexpr,
):  # fmt: skip
    """Multiplies a tile of `left` [rows, DEPTH] with one of `right` [columns, DEPTH] again and again."""
    program = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    row = program % ROW_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    column = program // ROW_TILES % right_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    at_left = left + row[:, None] * DEPTH + k[None, :]
    at_right = right + column[:, None] * DEPTH + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    turns = 0
    while _goes_on(enough, turns, most):
        for first in range(0, DEPTH, BLOCK_K):
            total = tl.dot(tl.load(at_left + first), tl.load(at_right + first).T, total)
        turns += 1
    tl.store(sums + program, tl.max(tl.max(total, 1), 0))


class Neighbour:
    """A load of one kind on a stream that has `sms` SMs. `memory`: 16-bit random numbers, which it only reads."""

    def __init__(self, kind: Kind, stream: torch.cuda.Stream, sms: int, memory: Tensor) -> None:
        rows = _ROW_TILES * _TILE[0]
        if memory.numel() < _DEPTH * (rows + _TILE[1]):
            raise ValueError(f"{memory.numel()} elements are too few for a tile of each factor")
        self.kind, self._stream, self._sms, self._memory = kind, stream, sms, memory
        self._enough = torch.zeros(1, dtype=torch.int32, device=memory.device)
        self._enough.fill_(1)  # what ends the load must be loaded before it runs: loading a kernel waits for the others
        self._sums = torch.zeros(sms * _READERS_PER_SM, dtype=torch.float32, device=memory.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Beside what is put on the current stream inside; what was put there is over when it ends."""
        with torch.cuda.stream(self._stream):
            self._enough.zero_()
            self.launch()
        try:
            yield
        finally:
            self._enough.fill_(1)  # in the order of the current stream
            torch.cuda.current_stream().synchronize()
            self._stream.synchronize()

    def launch(self) -> None:
        """Put the load on the current stream."""
        if self.kind == "reads":
            words = self._memory.view(torch.int32)
            programs = min(self._sms * _READERS_PER_SM, words.numel() // _READ_WORDS)
            _read[(programs,)](
                self._enough, words, self._sums.view(torch.int32), words.numel(), _MOST_TURNS,
                _READ_WORDS, _READS_AT_ONCE, _READS, num_warps=4,
            )  # fmt: skip
            return
        rows = _ROW_TILES * _TILE[0]
        right = self._memory[rows * _DEPTH :]
        _multiply[(self._sms,)](
            self._enough, self._memory, right, self._sums, right.numel() // (_DEPTH * _TILE[1]), _MOST_TURNS,
            *_TILE, _DEPTH, _ROW_TILES, num_warps=8, num_stages=3,
        )  # fmt: skip
