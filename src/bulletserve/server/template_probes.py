"""Whether a chat template shows the model tools and earlier calls: it is rendered with them and without.

Knows nothing about Jinja2. Templates get at what they show in many ways, so only the text tells. One that refuses what
is made up here gets the benefit of the doubt: it speaks for itself when a request comes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from bulletserve.core.errors import InvalidRequest

Objects: TypeAlias = Sequence[Mapping[str, Any]]
Render: TypeAlias = Callable[[Objects, Objects], str]
"""The text of messages and tools."""

_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}}
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "how it is there", "parameters": _PARAMETERS},
}
_SYSTEM: Mapping[str, Any] = {"role": "system", "content": "Be brief."}
_USER: Mapping[str, Any] = {"role": "user", "content": "How is it?"}
_CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bergen"}}}
_CALLED: Mapping[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_SAID: Mapping[str, Any] = {"role": "assistant", "content": ""}
_RESULT: Mapping[str, Any] = {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "wet"}


def shows_tools(render: Render) -> bool:
    """Whether tools are anywhere in the text."""
    chats: tuple[Objects, ...] = ([_USER], [_SYSTEM, _USER])
    return any(_differ(render, (chat, [_TOOL]), (chat, [])) for chat in chats)


def shows_calls(render: Render) -> bool:
    """Whether calls of earlier turns, and what came of them, are in the text."""
    called = ([_USER, _CALLED, _RESULT], [_TOOL])
    without_call = ([_USER, _SAID, _RESULT], [_TOOL])
    other_result = ([_USER, _CALLED, {**_RESULT, "content": "dry"}], [_TOOL])
    return _differ(render, called, without_call) and _differ(render, called, other_result)


def _differ(render: Render, one: tuple[Objects, Objects], other: tuple[Objects, Objects]) -> bool:
    try:
        return render(*one) != render(*other)
    except InvalidRequest:
        return True
