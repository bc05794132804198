"""Which seats have rules for their tokens, and which rows of a step therefore are drawn again.

Knows nothing about devices. An entry changes only when a request takes the seat, when no step under way uses it, so
the loop's thread may write while lanes read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from bulletserve.core.launch import Launch, PromptPart, Seat
from bulletserve.kernels.token_rules import RuledRow, RulesOfSeat

PROMPT_PIECE = 32
"""Prompt tokens whose logits are in memory at once."""


class PromptRun(NamedTuple):
    """Prompt tokens `first:end` of the launch's part number `part` are to be told of, each with `most` alternatives.

    `row`: the row of the batch from whose activations the first of them is predicted.
    """

    part: int
    row: int
    first: int
    end: int
    most: int

    def pieces(self, tokens: int) -> Iterator["PromptRun"]:
        """The same in pieces of at most so many tokens."""
        for first in range(self.first, self.end, tokens):
            yield self._replace(row=self.row + first - self.first, first=first, end=min(first + tokens, self.end))


class RuledSeats:
    """Empty as long as no request has rules: then every question costs nothing."""

    def __init__(self) -> None:
        self._of: dict[int, RulesOfSeat] = {}

    def prepare(self, launch: Launch) -> Sequence[Seat]:
        """Take in who sits down in a launch; those of them with rules."""
        ruled = []
        for seat in launch.seats:
            self._of.pop(seat.seat, None)
            if seat.rules is not None:
                rules = seat.rules
                if len(seat.token_ids) > seat.prompt_tokens:  # after a preemption: its prompt has been told of
                    rules = replace(rules, prompt_logprobs=None)
                self._of[seat.seat] = RulesOfSeat.of(rules, seat.prompt_tokens)
                ruled.append(seat)
        return ruled

    def drawn(
        self, parts: Sequence[PromptPart], rows: Sequence[int], length_of: Callable[[int], int]
    ) -> list[RuledRow]:
        """The rows with rules among those that a step draws; `length_of(seat)`: its tokens before the drawn one."""
        ruled = self._of
        if not ruled:
            return []
        seats = [*(part.seat for part in parts if part.samples), *rows]
        return [
            RuledRow(row, seat, length_of(seat), ruled[seat])
            for row, seat in enumerate(seats)
            if seat in ruled and ruled[seat].matters_at(length_of(seat))
        ]

    def prompt_runs(self, parts: Sequence[PromptPart]) -> list[PromptRun]:
        """What is to be told of a batch's prompts."""
        runs: list[PromptRun] = []
        row = 0
        for number, part in enumerate(parts) if self._of else ():
            of = self._of.get(part.seat)
            if of is not None and of.rules.prompt_logprobs is not None:
                end = min(part.end + 1, of.prompt_tokens)
                runs.append(PromptRun(number, row, part.start + 1, end, of.rules.prompt_logprobs))
            row += part.end - part.start
        return runs
