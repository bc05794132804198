"""All that is known of a model's text: its tokenizer, its chat template and the tokens that end an answer.

Knows nothing about HTTP or the engine; `LLM` uses it offline as the server does online.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bulletserve.core.errors import BrokenCheckpoint, ConfigError, InvalidRequest
from bulletserve.core.token_rules import MOST_WORD_TOKENS
from bulletserve.core.whole_text import check_text
from bulletserve.formats.description import Checkpoint
from bulletserve.server.byte_tokenizer import byte_backend
from bulletserve.server.chat_template import ChatTemplate
from bulletserve.server.detokenizer import Detokenizer
from bulletserve.server.text_marks import TextMarks
from bulletserve.server.token_bytes import open_character
from bulletserve.server.tokenizer import Tokenizer, build_tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How messages become a prompt. `variables` are for the template, `template` is Jinja2 source in place of it.

    continue_final_message: the prompt ends with the content of the last message, so that the answer continues that.
    needs_tools: the model is to call `tools` by itself, so it must see them.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    needs_tools: bool = False


class TextCodec:
    """Text to prompt ids, answer ids to text. Safe to use from several threads.

    `plain_messages`: control tokens that users write out in messages are text, and only the template's act as such.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        eos_ids: Sequence[int],
        *,
        plain_messages: bool = False,
    ) -> None:
        self._marks = TextMarks(tokenizer) if plain_messages else None
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self._chat_template = chat_template
        self._dropped: set[str] = set()
        self._bad_words: tuple[tuple[str, ...], list[tuple[int, ...]]] = (), []

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, chat_template: str | None = None, *, plain_messages: bool = False
    ) -> "TextCodec":
        """The codec of a checkpoint; `chat_template` is Jinja2 source that replaces the checkpoint's own.

        Random weights that come without a tokenizer get one of bytes and numbers. Raises `BrokenCheckpoint`,
        `UnsupportedModel` or `ConfigError` (a template that does not compile).
        """
        if checkpoint.tokenizer is not None:
            tokenizer = build_tokenizer(checkpoint.tokenizer)
        elif checkpoint.weights is None:
            tokenizer = Tokenizer(byte_backend(checkpoint.shape.vocab_size), {}, add_bos=False)
        else:
            raise BrokenCheckpoint(f"{checkpoint.name} has no tokenizer.json")
        source = checkpoint.chat_template if chat_template is None else chat_template
        template = None if source is None else ChatTemplate(source, tokenizer.special_tokens)
        return cls(tokenizer, template, checkpoint.eos_token_ids, plain_messages=plain_messages)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens included."""
        return self.tokenizer.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, begun with exactly one BOS token where the model wants one."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_end(self, text: str, tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        """The same, perhaps without some of the first: at least the last `tokens` are there."""
        return self.tokenizer.encode_end(text, tokens, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence of ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def shows_tools(self) -> bool:
        """Whether the model gets to see tools in chats."""
        return self._chat_template is not None and self._chat_template.shows_tools

    def render_chat(self, messages: Sequence[Mapping[str, Any]], style: ChatStyle = ChatStyle()) -> str:
        """A chat as prompt text for `encode_rendered`.

        Raises `InvalidRequest` if there is no template, it refuses the messages or what it makes of them is no text, or
        it drops tools that are needed. What else it drops of tools is said once in the log.
        """
        template = self._chat_template if style.template is None else _compiled(style.template, self.tokenizer)
        if template is None:
            raise InvalidRequest(
                "this model has no chat template: give bullet serve one with --chat-template FILE, or send plain "
                "prompts (/v1/completions, generate without --chat)",
                param="messages",
            )
        if style.tools and not template.shows_tools:
            if style.needs_tools:
                raise InvalidRequest(
                    'tool_choice "auto": the chat template shows the model no tools, so it would never call one: give '
                    'bullet serve one that does with --chat-template FILE; "required" and a named tool work without',
                    param="tool_choice",
                )
            self._warn_once("tools")
        if not template.shows_calls and any(m.get("tool_calls") or m["role"] == "tool" for m in messages):
            self._warn_once("earlier tool calls or their results")
        text = template.render(
            messages if self._marks is None else self._marks.mark(list(messages)),
            add_generation_prompt=style.add_generation_prompt,
            continue_final_message=style.continue_final_message,
            variables=style.variables if self._marks is None else self._marks.mark(dict(style.variables)),
            tools=style.tools,
        )
        check_text(text, "messages")
        return text

    def _warn_once(self, dropped: str) -> None:
        if dropped not in self._dropped:
            self._dropped.add(dropped)
            _log.warning(
                "the chat template does not show the model %s, and a request has some: give one that does with "
                "--chat-template FILE",
                dropped,
            )

    def encode_rendered(self, text: str, *, add_special_tokens: bool = False, tokens: int | None = None) -> list[int]:
        """The ids of what `render_chat` gave, where `tokens` is given perhaps only so many of the last.

        The template writes its own special tokens, so none are added.
        """
        if self._marks is not None:
            return self._marks.encode(text, add_special_tokens=add_special_tokens)
        if tokens is not None:
            return self.encode_end(text, tokens, add_special_tokens=add_special_tokens)
        return self.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], style: ChatStyle = ChatStyle()) -> list[int]:
        """The prompt ids of a chat: what `apply_chat_template(tokenize=True)` gives. Raises `InvalidRequest`."""
        return self.encode_rendered(self.render_chat(messages, style))

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        keep_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> Detokenizer:
        """What turns the ids of one answer to this prompt into text as they come."""
        pieces = self.tokenizer.pieces if skip_special_tokens else self.tokenizer.all_pieces
        tail = open_character(pieces, prompt_ids)
        return Detokenizer(pieces, stop=stop, keep_stop=keep_stop, min_tokens=min_tokens, tail=tail)

    def bad_word_ids(self, words: tuple[str, ...]) -> list[tuple[int, ...]]:
        """The ids of words that an answer must not hold, each at the start of a line and after a blank.

        Raises `InvalidRequest` for one of too many tokens.
        """
        known, known_ids = self._bad_words
        if words == known:  # all prompts of a request have the same
            return known_ids
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self.encode(text, add_special_tokens=False))
                if len(ids) > MOST_WORD_TOKENS:
                    raise InvalidRequest(
                        f"bad_words: {word[:40]!r} has {len(ids)} tokens, at most {MOST_WORD_TOKENS} may be banned",
                        param="bad_words",
                    )
                if ids:
                    found[ids] = None
        ids_of_words = list(found)
        self._bad_words = words, ids_of_words
        return ids_of_words


def _compiled(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    """A request's own template. Raises `InvalidRequest`."""
    try:
        return ChatTemplate(source, tokenizer.special_tokens)
    except ConfigError as error:
        raise InvalidRequest(str(error), param="chat_template") from None
