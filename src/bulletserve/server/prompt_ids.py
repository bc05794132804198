"""Text to prompt ids without holding anybody up, for requests and for `/tokenize` alike.

Knows nothing about sampling or limits on answers. Tokenising a long text takes milliseconds to seconds, so it goes to
worker threads (`workers`), where the tokenizers library works without the GIL; a short one costs less than the trip
there.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from bulletserve.core.errors import InvalidRequest
from bulletserve.core.resolve import context_too_long
from bulletserve.grammar.texts import LIGHT_CHARACTERS
from bulletserve.server.inputs import Json, message_list
from bulletserve.server.protocol import ChatFields
from bulletserve.server.structured import MakeGrammar
from bulletserve.server.text_codec import ChatStyle, TextCodec
from bulletserve.server.tools import ToolUse
from bulletserve.server.workers import Workers

_INLINE_CHARACTERS = 4000
"""Texts up to this are tokenised on the event loop: about 1 ms."""

_LONG_CHARACTERS = 1_000_000
"""Longer ones wait for each other only: about 0.25 s."""

_WORKERS = 2

Result = TypeVar("Result")


class PromptIds:
    """Makes ids with one codec.

    `request_templates`: requests may bring chat templates of their own, which
    are programs: they can take any time.
    """

    def __init__(self, codec: TextCodec, *, request_templates: bool = False) -> None:
        self._codec = codec
        self._request_templates = request_templates
        self._workers = Workers("tokenize", _WORKERS, _LONG_CHARACTERS)
        self._grammars = Workers("check-grammar", 1, LIGHT_CHARACTERS)

    @property
    def at_work(self) -> int:
        """Calls in the worker threads."""
        return self._workers.at_work + self._grammars.at_work

    def close(self) -> None:
        """End the worker threads."""
        self._workers.close()
        self._grammars.close()

    async def of_prompts(
        self,
        prompts: Sequence[str | list[int]],
        *,
        add_special_tokens: bool,
        limit: int | None,
        kept: int | None = None,
    ) -> list[tuple[int, ...]]:
        """The ids of texts; ids stay as they are. `kept`: only so many of the last of each.

        A text that must have more than `limit` tokens (None: no matter) is a `ContextTooLong`, told without tokenising.
        """
        for one in prompts:
            if isinstance(one, str):
                self._check(one, "prompt", limit)

        def encode_all() -> list[tuple[int, ...]]:
            encode = self._codec.encode if kept is None else partial(self._codec.encode_end, tokens=kept)
            several = (
                encode(one, add_special_tokens=add_special_tokens) if isinstance(one, str) else one for one in prompts
            )
            return [_packed(ids, kept) for ids in several]

        return await self.run(encode_all, sum(map(len, prompts)))

    async def of_chat(
        self,
        chat: ChatFields,
        tools: ToolUse,
        *,
        limit: int | None,
        kept: int | None = None,
    ) -> tuple[int, ...]:
        """The ids of a chat, or the last `kept` of them.

        Raises `InvalidRequest` or, as `of_prompts` does, `ContextTooLong`.
        """
        messages, style = message_list(chat.messages), self._style(chat, tools)

        def encode() -> tuple[int, ...]:
            text = self._codec.render_chat(messages, style)
            self._check(text, "messages", limit)
            ids = self._codec.encode_rendered(text, add_special_tokens=chat.add_special_tokens is True, tokens=kept)
            return _packed(ids, kept)

        characters = _characters(messages) + _characters(chat.chat_template_kwargs) + _characters(tools.listed)
        return await self.run(encode, characters if style.template is None else _LONG_CHARACTERS + 1)

    def _style(self, chat: ChatFields, tools: ToolUse) -> ChatStyle:
        goes_on = chat.continue_final_message is True
        if goes_on and chat.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        if chat.chat_template is not None and not self._request_templates:
            raise InvalidRequest(
                "chat_template in a request is allowed by bullet serve --trust-request-chat-template only",
                param="chat_template",
            )
        add_prompt = chat.add_generation_prompt is not False and not goes_on
        return ChatStyle(
            add_prompt,
            goes_on,
            chat.chat_template_kwargs or {},
            chat.chat_template,
            tools=tools.listed,
            needs_tools=tools.by_itself,
        )

    def _check(self, text: str, param: str, limit: int | None) -> None:
        longest = self._codec.tokenizer.longest_token
        if limit is not None and longest is not None and len(text) > limit * longest:
            raise context_too_long(limit, f"at least {len(text) // longest}", param=param)

    async def run(self, work: Callable[[], Result], characters: int) -> Result:
        """What `work` on so many characters returns: a little at once, much by a worker thread."""
        return work() if characters <= _INLINE_CHARACTERS else await self._workers.run(work, characters)

    async def grammar(self, make: MakeGrammar) -> str:
        """A grammar, made and checked by a worker, always: what it costs does not show in its length alone."""
        return await self._grammars.run(make, make.size)


def _packed(ids: Sequence[int], kept: int | None) -> tuple[int, ...]:
    """All of them or the last `kept`, as what the garbage collector does not go through: a prompt is held as long as
    its request is open."""
    return tuple(ids if kept is None else ids[-kept:])


def _characters(value: Json) -> int:
    """About how much there is for a template to go through."""
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 1


def kept_tokens(most: int | None, *, room: int) -> int | None:
    """How many of a prompt's last tokens are kept, None for all of it: `most`; -1 for as many as there is `room` for.

    Raises `InvalidRequest` for more than `room`.
    """
    if most is not None and most > room:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {most}, but there is room for a prompt of {room} tokens",
            param="truncate_prompt_tokens",
        )
    return room if most == -1 else most
