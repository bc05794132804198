"""Runs one launch on the model: builds the step's context, runs its layers, draws its tokens.

Knows nothing about threads, order or policies. A prefill batch lives here between its layer groups; only one thread
at a time may run prefill groups and mixed steps, and only one may run a given seat's decode rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bulletserve.core.errors import EngineError
from bulletserve.core.launch import Launch, PromptPart
from bulletserve.core.plan import PrefillGroup
from bulletserve.engine.drawn import Drawn
from bulletserve.engine.kv_cache import KvCache
from bulletserve.engine.masked import masked_rows
from bulletserve.engine.ruled_seats import PROMPT_PIECE, PromptRun
from bulletserve.engine.seats import SeatTable
from bulletserve.kernels.masks import keep_allowed
from bulletserve.kernels.sampling import sample
from bulletserve.kernels.token_rules import LogprobTensors, RuledRow, RuledRows, logprobs
from bulletserve.models.context import DecodeSegment, PrefillSegment, StepContext
from bulletserve.models.decoder import Decoder


@dataclass(slots=True)
class _Batch:
    """A prefill batch between its layer groups."""

    parts: tuple[PromptPart, ...]
    context: StepContext
    hidden: Tensor
    next_layer: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """The decode rows as a tensor, kept while the row tuple stays the same object."""

    of: tuple[int, ...]
    seats: Tensor


class StepRunner:
    """`run` is the whole interface; it returns what the launch has drawn."""

    def __init__(self, model: Decoder, cache: KvCache, seats: SeatTable) -> None:
        self._model = model
        self._cache = cache
        self._seats = seats
        self._batch: _Batch | None = None
        self._rows = _Rows((), torch.empty(0, dtype=torch.int64))

    @torch.inference_mode()
    def run(self, launch: Launch) -> Drawn:
        """Run the step to its end. Raises `EngineError` for a layer group whose batch was lost."""
        if isinstance(launch.step, PrefillGroup):
            return self._run_group(launch, launch.step)
        return self._run_whole(launch)

    def _run_group(self, launch: Launch, group: PrefillGroup) -> Drawn:
        first, end = group.layer_range
        if first == 0:
            ids, context = self._context(launch.parts, None)
            self._batch = _Batch(launch.parts, context, self._model.embed(ids), 0)
        batch, self._batch = self._batch, None
        if batch is None or batch.next_layer != first or batch.parts != launch.parts:
            raise EngineError("an earlier layer group of this prefill batch failed")
        batch.hidden = self._model.run_layers(batch.hidden, first, end, batch.context, self._cache)
        batch.next_layer = end
        if end < self._model.shape.num_layers:
            self._batch = batch
            return Drawn()
        return self._draw(batch.hidden, launch, None, batch.context)

    def _run_whole(self, launch: Launch) -> Drawn:
        rows = self._row_tensor(launch.rows) if launch.rows else None
        ids, context = self._context(launch.parts, rows)
        hidden = self._model.embed(ids)
        hidden = self._model.run_layers(hidden, 0, self._model.shape.num_layers, context, self._cache)
        return self._draw(hidden, launch, rows, context)

    def _row_tensor(self, rows: tuple[int, ...]) -> Tensor:
        kept = self._rows
        if kept.of is not rows:
            kept = self._rows = _Rows(rows, torch.tensor(rows, dtype=torch.int64))
        return kept.seats

    def _context(self, parts: tuple[PromptPart, ...], rows: Tensor | None) -> tuple[Tensor, StepContext]:
        """Token ids [T] of the step and its context: prompt parts first, decode rows last."""
        seats, size = self._seats, self._cache.block_size
        ids: list[Tensor] = []
        positions: list[Tensor] = []
        slots: list[Tensor] = []
        segments: list[PrefillSegment] = []
        start = 0
        for part in parts:
            position = torch.arange(part.start, part.end)
            table = seats.tables[part.seat, : -(-part.end // size)]
            ids.append(seats.prompt_tokens(part.seat, part.start, part.end))
            positions.append(position)
            slots.append(table[position // size] * size + position % size)
            segments.append(PrefillSegment(start, start + len(position), table, part.end))
            start += len(position)
        decode = None
        if rows is not None:
            position = seats.lengths[rows]
            tables = seats.tables[rows]
            ids.append(seats.last_token[rows])
            positions.append(position)
            block = tables.gather(1, (position // size).unsqueeze(1)).squeeze(1)
            slots.append(block * size + position % size)
            lengths = position + 1
            decode = DecodeSegment(start, start + len(rows), tables, lengths, int(lengths.max()))
        return _join(ids), StepContext(_join(positions), _join(slots), tuple(segments), decode)

    def _draw(self, hidden: Tensor, launch: Launch, rows: Tensor | None, context: StepContext) -> Drawn:
        """Draw the tokens of the parts that end their prompt and of the rows; note lengths and tokens."""
        seats, parts = self._seats, launch.parts
        ends = [(s.stop - 1, p) for s, p in zip(context.prefill, parts, strict=True) if p.samples]
        at = [torch.tensor([index for index, _ in ends], dtype=torch.int64)]
        who = [torch.tensor([part.seat for _, part in ends], dtype=torch.int64)]
        position = [torch.tensor([part.end for _, part in ends], dtype=torch.int64)]
        if context.decode is not None and rows is not None:
            at.append(torch.arange(context.decode.start, context.decode.stop))
            who.append(rows)
            position.append(context.decode.lengths)
        drawing, lengths = _join(who), _join(position)
        for part in parts:
            seats.lengths[part.seat] = part.end
        prompts = [(run, self._of_prompt(hidden, parts, run)) for run in _pieces(seats.ruled.prompt_runs(parts))]
        if not len(drawing):
            return Drawn(prompts=prompts)
        logits = self._model.logits(hidden[_join(at)])
        if masked := masked_rows(launch):
            keep_allowed(logits, [one.row for one in masked], [one.mask for one in masked])
        seats.lengths[drawing] = lengths
        ruled = seats.ruled.drawn(parts, () if rows is None else rows.tolist(), lambda seat: int(seats.lengths[seat]))
        sampling = seats.sampling(drawing, lengths)
        if ruled:
            free = torch.ones(len(drawing), dtype=torch.bool)
            free[[one.row for one in ruled]] = False
            tokens = torch.empty_like(drawing)
            others = free.nonzero().squeeze(1)
            tokens[others] = sample(logits[others], sampling.select(others))
        else:
            tokens = sample(logits, sampling)
        seats.last_token[drawing] = tokens
        drawn = Drawn(tokens, prompts=prompts)
        if ruled:
            self._draw_ruled(logits, ruled, drawn)
        return drawn

    def _draw_ruled(self, logits: Tensor, ruled: Sequence[RuledRow], drawn: Drawn) -> None:
        """Draw the tokens of rows with rules, from the step's `logits` [R, V]."""
        assert drawn.tokens is not None
        rows = RuledRows(ruled, logits.shape[1], logits.device)
        sampling = self._seats.sampling(rows.seats, rows.positions)
        chosen = rows.draw(
            logits[rows.at], self._seats.history, sampling.temperature, lambda changed: sample(changed, sampling)
        )
        self._seats.last_token[rows.seats] = chosen.tokens
        drawn.tokens[rows.at] = chosen.told
        if chosen.logprobs is not None:
            drawn.logprobs.append((ruled, chosen.logprobs))

    def _of_prompt(self, hidden: Tensor, parts: Sequence[PromptPart], run: PromptRun) -> LogprobTensors:
        """What is told of a piece of a prompt, from the batch's activations `hidden` [T, H]."""
        logits = self._model.logits(hidden[run.row : run.row + run.end - run.first])
        tokens = self._seats.prompt_tokens(parts[run.part].seat, run.first, run.end)
        return logprobs(logits, tokens, run.most)


def _pieces(runs: Iterable[PromptRun]) -> Iterator[PromptRun]:
    for run in runs:
        yield from run.pieces(PROMPT_PIECE)


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
