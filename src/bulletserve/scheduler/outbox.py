"""What a turn has to tell the requests' owners, collected until the turn ends.

Knows nothing about requests' phases. Arrays of ids, never an object per token.
"""

from itertools import compress
from typing import Any

from bulletserve.core.events import Output, StepDone
from bulletserve.core.request import Finished
from bulletserve.core.token_rules import TokenLogprobs
from bulletserve.scheduler.started_step import StartedStep


class Outbox:
    """`ids[i]` gets the token `tokens[i]`; `firsts` pairs requests with the prompt tokens found in the cache.

    Tuples, because those of the only step of a turn are told as they are: nothing and a tuple make that same tuple.
    """

    def __init__(self) -> None:
        self.ids: tuple[int, ...] = ()
        self.tokens: tuple[int, ...] = ()
        self.firsts: list[tuple[int, int]] = []
        self.finished: list[Finished] = []
        self.logprobs: list[tuple[int, TokenLogprobs]] = []
        self.prompt_logprobs: list[tuple[int, int, tuple[TokenLogprobs, ...]]] = []

    def tell(self, step: StartedStep, done: StepDone) -> None:
        """The tokens of one step, to all but its `void`, and what is told of them."""
        ids, tokens, void = step.drawn_ids, done.tokens, step.void
        for place, told in done.logprobs:
            if ids[place] not in void:
                self.logprobs.append((ids[place], told))
        for part, first, several in done.prompt_logprobs:
            if step.batch[part].id not in void:
                self.prompt_logprobs.append((step.batch[part].id, first, several))
        if void:
            heard = [request_id not in void for request_id in ids]
            ids, tokens = tuple(compress(ids, heard)), tuple(compress(tokens, heard))
        self.ids += ids
        self.tokens += tokens

    def take(self, now_s: float) -> Output | None:
        """Everything since the last call; None if nothing happened."""
        if not (self.ids or self.finished or self.prompt_logprobs):
            return None
        output = Output(
            now_s,
            self.ids,
            self.tokens,
            tuple(self.firsts),
            tuple(self.finished),
            tuple(self.logprobs),
            tuple(self.prompt_logprobs),
        )
        self.ids = self.tokens = ()
        lists: tuple[list[Any], ...] = (self.firsts, self.finished, self.logprobs, self.prompt_logprobs)
        for told in lists:
            told.clear()
        return output
