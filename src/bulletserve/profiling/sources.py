"""Work for a lane, step after step, without a scheduler: what a measurement keeps running.

Knows nothing about time or devices. A source makes the launches that `scheduler.state` would make for the same load:
seats once, a block when a row begins it, layer groups in order. Contexts are steered, so that a figure belongs to one
length although every decode step makes all rows longer.
"""

import random
from collections.abc import Sequence
from itertools import cycle
from typing import Protocol

from bulletserve.core.launch import Launch, PromptPart, Seat
from bulletserve.core.plan import DecodeStep, Lane, MixedStep, PrefillGroup

PROMPT_SEATS = 3
"""Two steps of a lane are under way, so two prompts may be; the third seat is the one that is written."""


class Source(Protocol):
    """What a driver asks for the next step of one lane."""

    lane: Lane

    def next(self, step_id: int) -> Launch:
        """The next step; its seats and blocks are those that changed."""

    def recentre(self, steps: int) -> None:
        """`steps` steps are about to be measured: choose lengths whose mean over them is the wanted one."""


class BlockPool:
    """Blocks 1 to `total` in random order, so that no sequence lies in one piece."""

    def __init__(self, total: int, seed: int = 1) -> None:
        self._free = list(range(1, total + 1))
        random.Random(seed).shuffle(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Blocks that nobody else has. Raises `ValueError` when there are too few."""
        if count > len(self._free):
            raise ValueError(f"{count} cache blocks wanted, {len(self._free)} are left")
        taken = tuple(self._free[-count:])
        del self._free[-count:]
        return taken


class DecodeRows:
    """`rows` sequences of about `context` tokens on seats 0, 1, ...; every step makes each a token longer.

    Lengths are spread over one block, as those of unrelated requests are: each step some rows begin a new block. A row
    grows by at most `growth` tokens and then starts over.
    """

    lane = Lane.DECODE

    def __init__(self, rows: int, context: int, sms: int, pool: BlockPool, block_size: int, growth: int = 768) -> None:
        self.rows = tuple(range(rows))
        self.sms = sms
        self.context = context
        self._size = block_size
        self._bases = [max(1, context - block_size // 2 + row % block_size) for row in range(rows)]
        self._most = growth // 2
        self._blocks = [pool.take((base + self._most) // block_size + 1) for base in self._bases]
        self._due: list[list[int]] = [[] for _ in range(block_size)]
        for row, base in enumerate(self._bases):
            self._due[base % block_size].append(row)
        self._first = self._offset = 0
        self._seated = False

    def lengths(self) -> list[int]:
        """Tokens in the cache of each row before the step that comes next."""
        return [base + self._offset for base in self._bases]

    def recentre(self, steps: int) -> None:
        """Start over at half of `steps` tokens below the wanted context."""
        self._first = -min(steps // 2, self._most, min(self._bases) - 1)
        self._seated = False

    def advance(self) -> tuple[tuple[Seat, ...], tuple[tuple[int, int], ...]]:
        """One step more for all rows: seats taken and blocks appended."""
        if self._offset > self._most:
            self._seated = False
        if not self._seated:
            self._seated = True
            self._offset = self._first + 1
            return tuple(self._seat(row, base + self._first) for row, base in enumerate(self._bases)), ()
        due = self._due[-self._offset % self._size]
        blocks = [(row, self._blocks[row][(self._bases[row] + self._offset) // self._size]) for row in due]
        self._offset += 1
        return (), tuple(blocks)

    def next(self, step_id: int) -> Launch:
        """A decode step of all rows."""
        seats, blocks = self.advance()
        return Launch(step_id, DecodeStep(self.sms), seats, blocks, (), self.rows)

    def _seat(self, row: int, length: int) -> Seat:
        return Seat(row, row, (), length, self._blocks[row][: length // self._size + 1], 0.0, 1.0, 0, 0)


def layer_groups(tokens: int, layers: int, group_token_layers: int, graph_tokens: int) -> list[tuple[int, int]]:
    """The layer ranges into which the scheduler cuts a prefill batch (`scheduler.batching.next_group`)."""
    size = layers if tokens <= graph_tokens else max(1, round(group_token_layers / tokens))
    groups: list[tuple[int, int]] = []
    first = 0
    while first < layers:
        end = min(layers, first + size)
        if layers - end <= size // 2:
            end = layers
        groups.append((first, end))
        first = end
    return groups


class Prompts:
    """One batch of prompts of `tokens` random tokens after another, each batch as the layer groups `groups`.

    `count` prompts make a batch. The first `cached` tokens of each are taken as if the prefix cache held them. `cut`:
    longest token range of one prompt in one batch, as `MAX_RANGE_TOKENS` (0: the rest of a prompt is one).
    """

    lane = Lane.PREFILL

    def __init__(
        self,
        tokens: int,
        sms: int,
        groups: Sequence[tuple[int, int]],
        pool: BlockPool,
        block_size: int,
        *,
        first_seat: int,
        vocabulary: int,
        cut: int = 0,
        cached: int = 0,
        count: int = 1,
    ) -> None:
        self.tokens = tokens
        self.sms = sms
        self.cached = cached
        rng = random.Random(tokens)
        self._ids = [rng.randrange(vocabulary) for _ in range(tokens)]
        blocks = -(-tokens // block_size)
        self._batches = cycle(
            [
                [(first_seat + batch * count + i, pool.take(blocks)) for i in range(count)]
                for batch in range(PROMPT_SEATS)
            ]
        )
        longest = cut or tokens
        ranges = [(start, min(tokens, start + longest)) for start in range(cached, tokens, longest)]
        self._work = cycle([(start, end, layers) for start, end in ranges for layers in groups])
        self._seated: tuple[int, ...] = ()

    def recentre(self, steps: int) -> None:
        """Every batch is alike."""

    def next(self, step_id: int) -> Launch:
        """The next layer group."""
        start, end, layers = next(self._work)
        seats: tuple[Seat, ...] = ()
        if start == self.cached and layers[0] == 0:
            batch = next(self._batches)
            self._seated = tuple(seat for seat, _ in batch)
            seats = tuple(_prompt_seat(seat, self._ids, self.cached, blocks) for seat, blocks in batch)
        parts = tuple(PromptPart(seat, start, end, end == self.tokens) for seat in self._seated)
        step = PrefillGroup(self._seated, ((start, end),) * len(parts), layers, self.sms)
        return Launch(step_id, step, seats, (), parts)


class MixedChunks:
    """Mixed steps: `chunk` prompt tokens and all rows of `decode` in one forward, as chunked prefill runs them.

    Prompts of `tokens` tokens follow each other without a gap: a chunk ends one and begins the next. The first `cached`
    tokens of each are taken as cached; with `cached + chunk` tokens, all steps are alike.
    """

    lane = Lane.PREFILL

    def __init__(
        self,
        decode: DecodeRows,
        chunk: int,
        tokens: int,
        sms: int,
        pool: BlockPool,
        block_size: int,
        vocabulary: int,
        cached: int = 0,
    ) -> None:
        self._decode, self._chunk, self._tokens, self._sms, self._cached = decode, chunk, tokens, sms, cached
        rng = random.Random(tokens)
        self._ids = [rng.randrange(vocabulary) for _ in range(tokens)]
        blocks = -(-tokens // block_size)
        seats = mixed_seats(chunk, tokens - cached)
        self._seats = cycle([(len(decode.rows) + i, pool.take(blocks)) for i in range(seats)])
        self._seat, self._done = -1, tokens

    def recentre(self, steps: int) -> None:
        """The rows' lengths."""
        self._decode.recentre(steps)

    def next(self, step_id: int) -> Launch:
        """A chunk and a decode step."""
        taken, blocks = self._decode.advance()
        seats = list(taken)
        parts: list[PromptPart] = []
        room = self._chunk
        while room:
            if self._done == self._tokens:
                self._seat, own = next(self._seats)
                self._done = self._cached
                seats.append(_prompt_seat(self._seat, self._ids, self._cached, own))
            end = min(self._tokens, self._done + room)
            parts.append(PromptPart(self._seat, self._done, end, end == self._tokens))
            room -= end - self._done
            self._done = end
        requests = tuple(part.seat for part in parts)
        step = MixedStep(requests, tuple((part.start, part.end) for part in parts), self._sms)
        return Launch(step_id, step, tuple(seats), blocks, tuple(parts), self._decode.rows)


def mixed_seats(chunk: int, new: int) -> int:
    """Seats of the prompts of mixed steps: a step holds pieces of at most so many, and so may the next one."""
    return 2 * (2 + chunk // new)


def _prompt_seat(seat: int, ids: Sequence[int], cached: int, blocks: tuple[int, ...]) -> Seat:
    return Seat(seat, seat, ids, cached, blocks, 0.0, 1.0, 0, 0)
