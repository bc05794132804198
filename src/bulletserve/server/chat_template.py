"""A chat as the text that the model was trained on, by the checkpoint's own Jinja2 template.

Knows nothing about token ids. Templates come with the model and run in Jinja2's sandbox, with the helpers that
template authors count on: those of transformers' `apply_chat_template`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bulletserve.core.errors import ConfigError, InvalidRequest
from bulletserve.server.template_probes import shows_calls, shows_tools

_OURS = frozenset({"messages", "add_generation_prompt", "tools", "documents"})
_SHOWN_CHARACTERS = 500


class ChatTemplate:
    """A compiled template. Safe to use from several threads.

    `special_tokens` (`bos_token`, ...) are variables in it. Raises `ConfigError` if `source` does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _compile(source)
        except TemplateError as error:
            raise ConfigError(
                f"the chat template does not compile ({error}); give another with --chat-template"
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The text of a chat; `variables` are what the request adds (`chat_template_kwargs`).

        `continue_final_message`: it ends with the content of the last message, so that the answer continues that.
        Raises `InvalidRequest` with the template's own message if it refuses these messages.
        """
        taken = _OURS.intersection(variables or ())
        if taken:
            raise InvalidRequest(
                f"chat_template_kwargs must not set {', '.join(sorted(taken))}", param="chat_template_kwargs"
            )
        values = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) or None,
            "documents": None,
        }
        try:
            text = self._template.render(values)
            return _up_to_content(text, messages[-1]) if continue_final_message else text
        except InvalidRequest:
            raise
        except Exception as error:  # templates index, add and call whatever the messages hold: all of it may fail
            reason = str(error)[:_SHOWN_CHARACTERS]
            raise InvalidRequest(f"the chat template refused the messages: {reason}", param="messages") from None

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the model gets to see tools."""
        return shows_tools(self._probe)

    @cached_property
    def shows_calls(self) -> bool:
        """Whether it gets to see earlier calls and what came of them."""
        return shows_calls(self._probe)

    def _probe(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        return self.render(messages, tools=tools)


def _up_to_content(text: str, message: Mapping[str, Any]) -> str:
    """`text` up to the end of what the template made of the last message's content, which it may have stripped."""
    content = message["content"]
    for shown in (content, content.rstrip(), content.strip()):
        place = text.rfind(shown)
        if shown and place >= 0:
            return text[: place + len(shown)]
    raise InvalidRequest(
        "continue_final_message: the chat template does not show the content of the last message",
        param="continue_final_message",
    )


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it is the text inside it."""

    tags = {"generation"}  # noqa: RUF012 (as in the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., object]] = {"raise_exception": _raise, "strftime_now": _now}
    environment.globals.update(helpers)
    return environment.from_string(source)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja2's own filter escapes what HTML would misread."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
