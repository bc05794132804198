"""The answers to one HTTP call while they grow: filled by `OpenRequests`, read by one handler.

Knows nothing about sockets or JSON. All of it lives on the event loop's thread.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bulletserve.core.errors import BulletError
from bulletserve.core.request import Request
from bulletserve.server.answer_extras import AnswerExtras
from bulletserve.server.detokenizer import Detokenizer
from bulletserve.server.token_log import ToldToken
from bulletserve.server.tool_calls import MakeReader


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt with all that answering it takes.

    `named_stop_ids` are the stop tokens that the client named: they are told back as `stop_reason`, the model's own
    end tokens are not. `copy`: of the answers to the same prompt, `copies` in all, which this is.
    `make_reader`: what finds tool calls in the answer, None where there can be none.
    """

    request: Request
    detokenizer: Detokenizer
    named_stop_ids: frozenset[int] = frozenset()
    extras: AnswerExtras | None = None
    copy: int = 0
    copies: int = 1
    make_reader: MakeReader | None = None


class End(NamedTuple):
    """Why an answer ended: `stop` or `length`, and the stop string or id that did it."""

    finish_reason: str
    stop_reason: str | int | None = None


class Delta(NamedTuple):
    """Text that answer number `choice` gained, its tokens so far, its end if this is the last, and what is told of
    the tokens of the text."""

    choice: int
    text: str
    tokens: int
    end: End | None
    told: list[ToldToken] | None = None


class Answer:
    """The answer to one prompt. `tokens` counts all that were generated, shown or not. `place`: where its last delta
    was put in line. It knows nothing of its call, which holds it: a circle would live until the garbage collector
    comes, and thousands of them make that a pause."""

    __slots__ = (
        "admitted_s",
        "cached_tokens",
        "choice",
        "end",
        "first_token_s",
        "last_token_s",
        "parts",
        "place",
        "prompt",
        "tokens",
        "told",
    )

    def __init__(self, prompt: Prompt, choice: int) -> None:
        self.prompt = prompt
        self.choice = choice
        self.tokens = 0
        self.place = 0
        self.cached_tokens = 0
        self.admitted_s = 0.0
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.parts: list[str] = []
        self.told: list[ToldToken] = []
        self.end: End | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt.request.prompt_ids)

    @property
    def text(self) -> str:
        """All text so far (kept only for calls that do not stream)."""
        return "".join(self.parts)


class Call:
    """One HTTP call: as many answers as prompts.

    `error` is why it failed, `gone` that the client left. A call that streams collects deltas, any other only its
    answers' texts, and is woken once, at the end.
    """

    __slots__ = ("_deltas", "_waiter", "answers", "error", "gone", "streaming", "unfinished")

    def __init__(self, prompts: Sequence[Prompt], *, streaming: bool) -> None:
        self.answers = [Answer(prompt, choice) for choice, prompt in enumerate(prompts)]
        self.unfinished = len(self.answers)
        self.streaming = streaming
        self.error: BulletError | None = None
        self.gone = False
        self._deltas: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return not self.unfinished or self.error is not None or self.gone

    async def changed(self) -> None:
        """Wait until there are deltas to take, or nothing more will come."""
        if self._deltas or self.done:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> list[Delta]:
        """The deltas since the last call, in order."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def add(self, answer: Answer, text: str) -> None:
        """`answer` gained `text`."""
        told = None
        if answer.prompt.extras is not None:
            text, told = answer.prompt.extras.shown(text, last=False, cut=False)
        if self.streaming:
            answer.place = len(self._deltas)
            self._deltas.append(Delta(answer.choice, text, answer.tokens, None, told))
            self.wake()
        else:
            answer.parts.append(text)
            answer.told += told or ()

    def finish(self, answer: Answer, text: str, end: End) -> None:
        """`answer` gained `text`, its last; the end rides on the last delta where that has not been taken yet."""
        answer.end = end
        self.unfinished -= 1
        told = None
        if answer.prompt.extras is not None:
            cut = isinstance(end.stop_reason, str)
            text, told = answer.prompt.extras.shown(text, last=True, cut=cut)
        if not self.streaming:
            answer.parts.append(text)
            answer.told += told or ()
        elif answer.place < len(self._deltas) and (last := self._deltas[answer.place]).choice == answer.choice:
            told = None if told is None else [*(last.told or ()), *told]
            self._deltas[answer.place] = Delta(answer.choice, last.text + text, answer.tokens, end, told)
        else:
            self._deltas.append(Delta(answer.choice, text, answer.tokens, end, told))
        if self.streaming or self.done:
            self.wake()

    def fail(self, error: BulletError) -> None:
        """The whole call ends with an error; the first one counts."""
        self.error = self.error or error
        self.wake()

    def leave(self) -> None:
        """The client is gone."""
        self.gone = True
        self.wake()

    def wake(self) -> None:
        """Let the handler go on."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
