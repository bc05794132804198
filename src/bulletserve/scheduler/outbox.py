"""What a turn has to tell the requests' owners, collected until the turn ends.

Knows nothing about requests' phases. Arrays of ids, never an object per token.
"""

from collections.abc import Sequence, Set
from itertools import compress

from bulletserve.core.events import Output
from bulletserve.core.request import Finished


class Outbox:
    """`ids[i]` gets the token `tokens[i]`; `firsts` pairs requests with the prompt tokens found in the cache."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.tokens: list[int] = []
        self.firsts: list[tuple[int, int]] = []
        self.finished: list[Finished] = []

    def tell(self, ids: Sequence[int], tokens: Sequence[int], void: Set[int]) -> None:
        """The tokens of one step: `ids[i]` hears `tokens[i]`, unless it is among the `void`."""
        if void:
            heard = [request_id not in void for request_id in ids]
            ids, tokens = tuple(compress(ids, heard)), tuple(compress(tokens, heard))
        self.ids += ids
        self.tokens += tokens

    def take(self, now_s: float) -> Output | None:
        """Everything since the last call; None if nothing happened."""
        if not (self.ids or self.finished):
            return None
        output = Output(now_s, tuple(self.ids), tuple(self.tokens), tuple(self.firsts), tuple(self.finished))
        for told in (self.ids, self.tokens, self.firsts, self.finished):
            told.clear()
        return output
