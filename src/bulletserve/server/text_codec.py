"""All that is known of a model's text: its tokenizer, its chat template and the tokens that end an answer.

Knows nothing about HTTP or the engine; `LLM` uses it offline as the server does online.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bulletserve.core.errors import BrokenCheckpoint, InvalidRequest
from bulletserve.formats.description import Checkpoint
from bulletserve.server.byte_tokenizer import byte_backend
from bulletserve.server.chat_template import ChatTemplate
from bulletserve.server.detokenizer import Detokenizer
from bulletserve.server.token_bytes import open_character
from bulletserve.server.tokenizer import Tokenizer, build_tokenizer


class TextCodec:
    """Text to prompt ids, answer ids to text. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, eos_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self._chat_template = chat_template

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, chat_template: str | None = None) -> "TextCodec":
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
        return cls(tokenizer, template, checkpoint.eos_token_ids)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens included."""
        return self.tokenizer.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, begun with exactly one BOS token where the model wants one."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence of ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """A chat as prompt text, to be encoded without special tokens: the template writes its own.

        Raises `InvalidRequest` if there is no template or it refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequest(
                "this model has no chat template: give bullet serve one with --chat-template FILE, or send plain "
                "prompts (/v1/completions, generate without --chat)",
                param="messages",
            )
        return self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables, tools=tools
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt ids of a chat: what `apply_chat_template(tokenize=True)` gives."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        return self.encode(text, add_special_tokens=False)

    def detokenizer(
        self, prompt_ids: Sequence[int], *, stop: Sequence[str] = (), skip_special_tokens: bool = True
    ) -> Detokenizer:
        """What turns the ids of one answer to this prompt into text as they come."""
        pieces = self.tokenizer.pieces if skip_special_tokens else self.tokenizer.all_pieces
        return Detokenizer(pieces, stop=stop, tail=open_character(pieces, prompt_ids))
