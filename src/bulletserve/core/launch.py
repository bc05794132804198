"""A start made concrete: which seats, blocks and rows one step touches.

Knows nothing about tensors. A policy thinks in requests; an executor works on *seats*, the rows of its tables.
Only what changed travels: a seat once, a block when it is appended, the row tuple by identity while nobody
joins or leaves.
"""

from collections.abc import Sequence
from typing import NamedTuple

from bulletserve.core.plan import Lane, Start, lanes_of
from bulletserve.core.token_rules import TokenRules


class Seat(NamedTuple):
    """A request takes a seat: everything the device must know of it, sent with the first step that uses it.

    `token_ids` are all tokens whose keys and values the prefill makes (prompt, plus what was generated before a
    preemption); the first `cached_tokens` of them are in the cache already. Sampling position p draws the token
    that follows p tokens, so a resumed request draws what it would have drawn. The first `prompt_tokens` are the
    prompt's; told only where there are `rules`.
    """

    seat: int
    request_id: int
    token_ids: Sequence[int]
    cached_tokens: int
    blocks: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    rules: TokenRules | None = None
    prompt_tokens: int = 0


class PromptPart(NamedTuple):
    """Tokens `start:end` of a seat's prompt. `samples`: the prompt ends here and its first token is drawn."""

    seat: int
    start: int
    end: int
    samples: bool


class Launch(NamedTuple):
    """One step, ready to run.

    `seats` and `blocks` (seat, block id, appended to the seat's table) take effect before the step runs.
    The step's tokens come back in the order: parts that sample, then `rows`. `masks`: what the token of a seat may be
    (as in `events.Masked`), for every seat with a grammar that draws one in this step.
    """

    step_id: int
    step: Start
    seats: tuple[Seat, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    parts: tuple[PromptPart, ...] = ()
    rows: tuple[int, ...] = ()
    masks: tuple[tuple[int, bytes], ...] = ()

    @property
    def lane(self) -> Lane:
        """The lane that carries it (a mixed step runs on the prefill lane)."""
        return lanes_of(self.step)[0]
