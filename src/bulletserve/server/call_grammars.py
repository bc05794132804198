"""Grammars of tool calls: what an answer may be that has to call, or may.

Knows nothing about how calls are read. Tools are checked already (`tools`). All functions raise `InvalidRequest` for
schemas that cannot be followed.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from bulletserve.core.errors import InvalidRequest
from bulletserve.grammar.closed_objects import closed
from bulletserve.grammar.texts import json_grammar, marked_grammar

Json: TypeAlias = Any


def arguments_grammar(tool: dict[str, Json]) -> str:
    """The arguments of one tool."""
    return _grammar(_parameters(tool))


def list_grammar(tools: Sequence[dict[str, Json]], *, several: bool) -> str:
    """A JSON list of calls, of one unless there may be `several`."""
    calls, defined = _calls(tools, "parameters")
    limit = {} if several else {"maxItems": 1}
    return _grammar({"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}, **defined})


def beside_grammar(answer: str, tools: Sequence[dict[str, Json]], marks: tuple[str, str], *, several: bool) -> str:
    """An answer of the grammar `answer`, or calls between `marks`, as models write them."""
    calls, defined = _calls(tools, "arguments")
    return marked_grammar(answer, _grammar({"anyOf": calls, **defined}), marks, several=several, param="tools")


def _grammar(schema: dict[str, Json]) -> str:
    """Arguments are none but those that are named."""
    return json_grammar(closed(schema), "tools")


def _parameters(tool: dict[str, Json]) -> dict[str, Json]:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}}


def _calls(tools: Sequence[dict[str, Json]], key: str) -> tuple[list[dict[str, Json]], dict[str, Json]]:
    """The schema of a call of each tool, its arguments under `key`; and definitions, which move from each tool's schema
    to the root that their references start from."""
    shared: dict[str, dict[str, Json]] = {"$defs": {}, "definitions": {}}
    calls = []
    for tool in tools:
        parameters = dict(_parameters(tool))
        for keyword, known in shared.items():
            inner = parameters.pop(keyword, None)
            for name, schema in inner.items() if isinstance(inner, dict) else ():
                if known.setdefault(name, schema) != schema:
                    raise InvalidRequest(f"tools: two of them define {name!r:.100} differently", param="tools")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, key: parameters},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return calls, {keyword: known for keyword, known in shared.items() if known}
