"""What a request is about: its prompt or its messages, checked by hand.

Knows nothing about templates or tokens. By hand, because a prompt may be any of four things and millions of items
long: the first wrong item ends the check, and no list of errors is ever built.
"""

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from bulletserve.core.errors import InvalidRequest

Json: TypeAlias = Any


def prompt_count(prompt: Json) -> int:
    """How many prompts `prompt_list` would have to look at."""
    return len(prompt) if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else 1


def prompt_list(prompt: Json) -> list[str | list[int]]:
    """The prompts of a completion: a string, a list of strings, a list of ids or a list of lists of ids.

    What begins with a number is a list of ids; whether all of it are ids is seen where they are compared with the
    vocabulary (`core.resolve.check_ids`). Raises `InvalidRequest` for anything else, and for an empty prompt.
    """
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt must be a string, a list of strings, or token ids", param="prompt")
    if not prompt or type(prompt[0]) is int:
        prompt = [prompt]
    if set(map(type, prompt)) not in ({str}, {list}):
        raise InvalidRequest("prompt must be a string, a list of strings, or token ids", param="prompt")
    if not all(prompt):
        raise InvalidRequest("prompt must not be empty", param="prompt")
    result: list[str | list[int]] = prompt
    return result


def message_list(messages: Json) -> list[dict[str, Json]]:
    """The messages of a chat, each content as one string and the arguments of calls as values; other fields are
    left to the template.

    Text parts (of assistants' messages refusals, too, which clients send back) are joined by line breaks, as vLLM does.
    Raises `InvalidRequest` naming the first bad message.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Json, where: str) -> dict[str, Json]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object", param="messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role must be a string", param="messages")
    if isinstance(content, list):
        kinds = ("text", "refusal") if role == "assistant" else ("text",)
        content = "\n".join(_text_part(part, kinds, f"{where}.content[{place}]") for place, part in enumerate(content))
    elif content is None and role == "assistant":
        content = ""
    elif not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a string or a list of text parts", param="messages")
    return _read_arguments({**message, "content": content}, where)


def _text_part(part: Json, kinds: Sequence[str], where: str) -> str:
    """The text of a part, which stands under the name of its kind."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds or not isinstance(part.get(kind), str):
        raise InvalidRequest(
            f'{where} must be {{"type": "text", "text": ...}}: this model takes text', param="messages"
        )
    text: str = part[kind]
    return text


def _read_arguments(message: dict[str, Json], where: str) -> dict[str, Json]:
    """An assistant's message with the arguments of its calls as objects: clients send JSON text, templates print it or
    go through it. Raises `InvalidRequest`."""
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls must be a list", param="messages")
    return {**message, "tool_calls": [_read_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]}


def _read_call(call: Json, where: str) -> dict[str, Json]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function must have a name and arguments", param="messages")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments") or "{}")}}


def _arguments(written: Json) -> dict[str, Json]:
    """What a model writes may be broken or cut off, and clients send it back as they got it: what is no JSON object is
    text in one."""
    value = written
    if isinstance(written, str):
        try:
            value = json.loads(written)
        except (ValueError, RecursionError):
            return {"arguments": written}
    return value if isinstance(value, dict) else {"arguments": written}
