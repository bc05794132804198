"""What is told of the tokens of one answer: which are shown, where their text begins, how likely they were.

Knows nothing about sockets. A token is told of with the text that it begins in: as long as that may still turn out to
be part of a stop string it waits, and if it does it is never told of. So the log is the same however an answer is cut
into events.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from bulletserve.core.token_rules import TokenLogprobs
from bulletserve.server.detokenizer import Detokenizer
from bulletserve.server.token_bytes import Piece


class ToldToken(NamedTuple):
    """A token whose text begins at `offset` characters; `told` is None where nothing is known (a prompt's first)."""

    token_id: int
    offset: int
    told: TokenLogprobs | None


class TokenLog:
    """The tokens of one answer, in order. `text` turns them into text without looking for stop strings, by
    `pieces`."""

    def __init__(self, text: Detokenizer, pieces: Sequence[Piece]) -> None:
        self._text = text
        self._pieces = pieces
        self._characters = 0
        self._shown = 0
        self._held: list[ToldToken] = []

    def push(self, token_id: int, told: TokenLogprobs | None) -> None:
        """A token has followed."""
        before = self._characters
        self._characters += len(self._text.push(token_id))
        piece = self._pieces[token_id] if token_id < len(self._pieces) else ""
        own = piece if isinstance(piece, str) else piece.decode(errors="replace")
        # What the token completes is one character, of which it is the end; what it makes plain to be no character at
        # all is not its own.
        offset = self._characters if self._text.is_open else max(before, self._characters - len(own))
        self._held.append(ToldToken(token_id, offset, told))

    def take(self, text: str, *, last: bool) -> list[ToldToken]:
        """The tokens that can be told of now that `text` is shown. `last`: all that are left, the text is whole."""
        self._shown += len(text)
        count = 0
        while count < len(self._held) and (last or self._held[count].offset < self._shown):
            count += 1
        taken, self._held = self._held[:count], self._held[count:]
        return taken


class TokenNames:
    """What tokens are called in answers. `pieces[id]`: the text or bytes of a token, control tokens included."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def completion(self, tokens: Sequence[ToldToken]) -> dict[str, Any]:
        """`logprobs` of a completion. The token itself is among the likeliest always."""
        return {
            "tokens": [self._name(one.token_id) for one in tokens],
            "token_logprobs": [None if one.told is None else one.told.logprob for one in tokens],
            "top_logprobs": [None if one.told is None else self._likeliest(one.token_id, one.told) for one in tokens],
            "text_offset": [one.offset for one in tokens],
        }

    def chat(self, tokens: Sequence[ToldToken]) -> dict[str, Any]:
        """`logprobs` of a chat."""
        return {
            "content": [
                self._entry(one.token_id, one.told.logprob)
                | {"top_logprobs": [self._entry(*pair) for pair in _pairs(one.told)]}
                for one in tokens
                if one.told is not None
            ],
            "refusal": None,
        }

    def prompt(self, tokens: Iterable[ToldToken]) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`, as vLLM writes them: by id, with ranks."""
        return [None if one.told is None else self._ranked(one.token_id, one.told) for one in tokens]

    def _ranked(self, token_id: int, told: TokenLogprobs) -> dict[str, Any]:
        ranks = {token: (rank, logprob) for rank, (token, logprob) in enumerate(_pairs(told), 1)}
        ranks[token_id] = (told.rank, told.logprob)
        return {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": self._name(token)}
            for token, (rank, logprob) in ranks.items()
        }

    def _likeliest(self, token_id: int, told: TokenLogprobs) -> dict[str, float]:
        named: dict[str, float] = {}
        for token, logprob in (*_pairs(told), (token_id, told.logprob)):
            named.setdefault(self._name(token), logprob)
        return named

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(token_id), "logprob": logprob, "bytes": list(self._bytes(token_id))}

    def _name(self, token_id: int) -> str:
        return self._bytes(token_id).decode(errors="replace")

    def _bytes(self, token_id: int) -> bytes:
        piece = self._pieces[token_id] if token_id < len(self._pieces) else ""
        return piece.encode() if isinstance(piece, str) else piece


def _pairs(told: TokenLogprobs) -> Iterable[tuple[int, float]]:
    return zip(told.top_ids, told.top_logprobs, strict=True)
