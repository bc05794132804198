"""What some answers have beyond their text: an echo of the prompt, what is told of tokens, or no token at all.

Knows nothing about sockets or engines. Answers that ask for none of it have none of this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bulletserve.core.token_rules import TokenLogprobs
from bulletserve.server.detokenizer import Detokenizer
from bulletserve.server.token_log import TokenLog, TokenNames, ToldToken


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as text: `offsets[i]` is where its token i begins."""

    text: str
    offsets: Sequence[int]


def echo_of(ids: Sequence[int], detokenizer: Detokenizer, sent: str | None) -> Echo:
    """The text of prompt `ids`, by a fresh `detokenizer` that shows control tokens; `sent` is how the client wrote it,
    if it did.

    A tokenizer may put something before a text or after it (a blank, a BOS token): the echo of a text is the text.
    """
    offsets, pieces, characters = [], [], 0
    for token_id in ids:
        offsets.append(characters)
        pieces.append(detokenizer.push(token_id))
        characters += len(pieces[-1])
    text = "".join(pieces) + detokenizer.finish()
    if sent is not None and (lead := text.rfind(sent)) >= 0:
        text, offsets = sent, [min(max(0, offset - lead), len(sent)) for offset in offsets]
    return Echo(text, tuple(offsets))  # not a list: the collector goes through those


class AnswerExtras:
    """The extras of one answer to the prompt `ids`.

    silent: the token that the engine makes, because it makes one at least, is not told. shows_stop: a token that stops
    the answer is part of its text. log: the answer's tokens are told of; tells_prompt: so are the prompt's, under a
    name of their own. With an `echo` the prompt comes before the answer, and in `logprobs` too.
    """

    def __init__(
        self,
        ids: Sequence[int],
        names: TokenNames,
        *,
        chat: bool,
        silent: bool = False,
        shows_stop: bool = False,
        log: TokenLog | None = None,
        echo: Echo | None = None,
        tells_prompt: bool = False,
    ) -> None:
        self.silent = silent
        self.shows_stop = shows_stop
        self.log = log
        self.tells_prompt = tells_prompt
        self._ids = ids
        self._names = names
        self._chat = chat
        self._echo = echo
        self._opened = False
        self._of_prompt: dict[int, TokenLogprobs] = {}

    def hear(self, token_id: int, told: TokenLogprobs | None) -> None:
        """The answer's next token."""
        if self.log is not None:
            self.log.push(token_id, told)

    def hear_of_prompt(self, first: int, several: Sequence[TokenLogprobs]) -> None:
        """What is told of the prompt's tokens from the place `first` on."""
        self._of_prompt.update(enumerate(several, first))

    def shown(self, text: str, *, last: bool, cut: bool) -> tuple[str, list[ToldToken] | None]:
        """What is sent with `text`, and all of the text that is: on the first call an echo comes before it.

        `cut`: a stop string ended the answer, and tokens within it are told no more.
        """
        taken = None if self.log is None else self.log.take(text, last=last and not cut)
        if self._echo is None:
            return text, taken
        if taken is not None:
            shift = len(self._echo.text)
            taken = [one._replace(offset=one.offset + shift) for one in taken]
        if not self._opened:
            self._opened = True
            return self._echo.text + text, None if taken is None else [*self._prompt(), *taken]
        return text, taken

    def logprobs(self, tokens: Sequence[ToldToken]) -> dict[str, Any]:
        """The field `logprobs` of these tokens."""
        return self._names.chat(tokens) if self._chat else self._names.completion(tokens)

    def prompt_logprobs(self) -> list[dict[str, Any] | None]:
        """The field of that name."""
        return self._names.prompt(self._prompt())

    def _prompt(self) -> list[ToldToken]:
        offsets = self._echo.offsets if self._echo is not None else [0] * len(self._ids)
        return [
            ToldToken(token_id, offset, self._of_prompt.get(place))
            for place, (token_id, offset) in enumerate(zip(self._ids, offsets, strict=True))
        ]
