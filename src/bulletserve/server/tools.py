"""The tools that a chat request brings, and what it says about calling them.

Knows nothing about how a model writes calls (`tool_calls` does). "required" and a named tool are kept by a grammar,
whatever the model; "auto" leaves the choice to it and needs a reader of its format.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from bulletserve.core.errors import InvalidRequest
from bulletserve.server.call_formats import CallFormat, EitherReader
from bulletserve.server.call_grammars import arguments_grammar, beside_grammar, list_grammar
from bulletserve.server.protocol import ChatFields
from bulletserve.server.structured import MakeGrammar
from bulletserve.server.tool_calls import CallReader, ListReader, MakeReader, NamedReader

Json: TypeAlias = Any

MOST_TOOLS = 128
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`listed`: what the chat template shows. `make_reader`: finds calls in the answer's text, None where there can be
    none. `make_grammar`: what the answer must fit. `by_itself`: the model calls them only if it has seen them."""

    listed: list[dict[str, Json]] = field(default_factory=list)
    make_reader: MakeReader | None = None
    make_grammar: MakeGrammar | None = None
    by_itself: bool = False


def tool_use(body: ChatFields, auto: CallFormat | None, answer: MakeGrammar | None) -> ToolUse:
    """What a request says about tools. `auto`: the model's own format, where the operator set one; `answer`: what an
    answer must fit that is no call.

    Raises `InvalidRequest` for tools that are none, a choice that names none of them, or "auto" without a format.
    """
    tools = _tools(body.tools)
    choice = _choice(body.tool_choice, tools)
    several = body.parallel_tool_calls is not False
    if choice == "none":
        return ToolUse(tools, make_grammar=answer)
    if choice == "auto":
        if auto is None:
            raise InvalidRequest(
                'tool_choice "auto" (with tools the default) needs bullet serve --enable-auto-tool-choice '
                "--tool-call-parser NAME and a chat template that shows the model tools; "
                '"required" and a named tool work without',
                param="tool_choice",
            )
        return _by_itself(tools, auto, answer, several=several)
    if choice == "required":
        return ToolUse(tools, ListReader, MakeGrammar(lambda: list_grammar(tools, several=several), tools))
    name = choice.removeprefix("=")
    named = next(tool for tool in tools if tool["function"]["name"] == name)
    return ToolUse(tools, lambda: NamedReader(name), MakeGrammar(lambda: arguments_grammar(named), named))


def _by_itself(tools: list[dict[str, Json]], auto: CallFormat, answer: MakeGrammar | None, *, several: bool) -> ToolUse:
    """The model calls or answers, as it likes."""
    make_reader, marks = auto
    most = None if several else 1
    if answer is None:
        return ToolUse(tools, lambda: CallReader(make_reader(), most), by_itself=True)
    if marks is None:
        raise InvalidRequest(
            "calls of this model's format cannot be told from an answer that has a format: with tools and a format set "
            'tool_choice to "none", "required" or a named tool',
            param="tool_choice",
        )
    return ToolUse(
        tools,
        lambda: EitherReader(make_reader(), marks[0]),
        MakeGrammar(lambda: beside_grammar(answer(), tools, marks, several=several), [answer.of, tools]),
        by_itself=True,
    )


def _tools(tools: Json) -> list[dict[str, Json]]:
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise InvalidRequest(f"tools must be a list of at most {MOST_TOOLS} tools", param="tools")
    names = [_checked_name(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two of them have the same name", param="tools")
    return tools


def _checked_name(tool: Json, where: str) -> str:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise InvalidRequest(f'{where} must be {{"type": "function", "function": {{...}}}}', param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not _NAME_CHARACTERS.issuperset(name):
        raise InvalidRequest(
            f"{where}.function.name must be 1 to {_LONGEST_NAME} letters, digits, underscores, dots or hyphens",
            param="tools",
        )
    if not isinstance(function.get("parameters"), dict | None):
        raise InvalidRequest(f"{where}.function.parameters must be a JSON schema, an object", param="tools")
    return name


def _choice(choice: Json, tools: Sequence[dict[str, Json]]) -> str:
    """none, auto, required, or = and the name of a tool."""
    if choice is None:
        return "auto" if tools else "none"
    if choice in ("none", "auto") and not tools:
        return "none"
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict) and choice.get("type") == "function":
        name = choice["function"].get("name")
        if not any(tool["function"]["name"] == name for tool in tools):
            raise InvalidRequest(f"tool_choice: no tool is called {name!r:.100}", param="tool_choice")
        return f"={name}"
    if choice not in ("none", "auto", "required"):
        raise InvalidRequest(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    if not tools:
        raise InvalidRequest('tool_choice "required" needs tools', param="tool_choice")
    return str(choice)
