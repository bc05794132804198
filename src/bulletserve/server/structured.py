"""Which grammar is asked for, over HTTP or of `LLM`: `response_format`, `structured_outputs` and the older `guided_*`.

Knows nothing about tokens or tools. One of them at most; whatever a client sends, it hears here what is wrong with it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeAlias

from bulletserve.core.errors import InvalidRequest
from bulletserve.grammar.texts import (
    ANY_OBJECT,
    LIGHT_CHARACTERS,
    choice_grammar,
    json_grammar,
    regex_grammar,
    written_grammar,
)

Json: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class MakeGrammar:
    """Called, makes the grammar and checks it, in its own time: not on the event loop. Raises `InvalidRequest`.

    `of`: what it is made of.
    """

    make: Callable[[], str]
    of: Json = None

    def __call__(self) -> str:
        """The grammar."""
        try:
            return self.make()
        except RecursionError:
            raise InvalidRequest("a schema or the parameters of a tool are nested too deeply") from None

    @property
    def size(self) -> int:
        """About the characters that it is written in; not counted much further than a light one's."""
        size, left = 0, [self.of]
        while left and size <= LIGHT_CHARACTERS:
            value = left.pop()
            size += len(value) + 4 if isinstance(value, str) else 4
            if isinstance(value, list):
                left += value[:LIGHT_CHARACTERS]
            elif isinstance(value, dict):
                for pair in islice(value.items(), LIGHT_CHARACTERS):
                    left += pair
        return size


_FORMATS = ("text", "json_object", "json_schema")
_OF_SCHEMA = ("name", "description", "strict", "schema")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class AnswerFormat(Protocol):
    """Where a format may be asked for; None everywhere for a free answer."""

    @property
    def response_format(self) -> Json: ...
    @property
    def structured_outputs(self) -> Json: ...
    @property
    def guided_json(self) -> Json: ...
    @property
    def guided_regex(self) -> Json: ...
    @property
    def guided_choice(self) -> Json: ...
    @property
    def guided_grammar(self) -> Json: ...


def wanted_grammar(body: AnswerFormat) -> MakeGrammar | None:
    """What makes the grammar of the whole answer; None for a free one. Raises `InvalidRequest`."""
    wanted = [
        _of_format(body.response_format),
        _of_outputs(body.structured_outputs),
        *(_make(kind, getattr(body, name), name) for name, kind in _GUIDED.items() if getattr(body, name) is not None),
    ]
    makers = [maker for maker in wanted if maker is not None]
    if len(makers) > 1:
        raise InvalidRequest("an answer takes one format: response_format, structured_outputs or one guided_* field")
    return makers[0] if makers else None


def _of_format(value: Json) -> MakeGrammar | None:
    """`response_format`. Its schema may stand in `schema` too, where llama.cpp and others have it."""
    if value is None:
        return None
    param = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _FORMATS:
        raise InvalidRequest(f"{param}.type must be text, json_object or json_schema", param=param)
    named = kind == "json_schema" and value.get("schema") is None
    _check_keys(value, ("type", *(() if kind == "text" else ("json_schema",) if named else ("schema",))), param)
    if kind == "text":
        return None
    inner, where = (value.get("json_schema"), f"{param}.json_schema") if named else (value, param)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if kind == "json_object" and schema in (None, {}):
        return _make("json_object", None, param)
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where}.schema must be a JSON schema, an object", param=param)
    if named:
        _check_keys(inner, _OF_SCHEMA, where)
    return _make("json", schema, param)


def _check_keys(value: Mapping[str, Json], known: Sequence[str], where: str) -> None:
    """Raise for a key that says something that would not be heard."""
    for name, inner in value.items():
        if name not in known and inner is not None:
            raise InvalidRequest(
                f"{where} takes {' and '.join(known)} here, not {name:.100}", param=where.partition(".")[0]
            )


def _of_outputs(value: Json) -> MakeGrammar | None:
    """`structured_outputs`, of which one kind may be set."""
    if value is None:
        return None
    param = "structured_outputs"
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{param} must be an object with one of {', '.join(_KINDS)}", param=param)
    asked = {name: inner for name, inner in value.items() if inner is not None and inner is not False}
    for name in asked:
        if name not in _KINDS:
            raise InvalidRequest(f"{param}.{name!s:.100} is not supported, but {', '.join(_KINDS)} are", param=param)
    if len(asked) != 1:
        raise InvalidRequest(f"{param} must have exactly one of {', '.join(_KINDS)}", param=param)
    ((kind, inner),) = asked.items()
    return _make(kind, inner, param)


def _make(kind: str, value: Json, param: str) -> MakeGrammar:
    return MakeGrammar(_maker(kind, value, param), value)


def _maker(kind: str, value: Json, param: str) -> Callable[[], str]:
    if kind == "json_object":
        return lambda: json_grammar(ANY_OBJECT, param)
    if kind == "json":
        if isinstance(value, str):
            return lambda: json_grammar(_parsed(value, param), param)
        if not isinstance(value, dict):
            raise InvalidRequest(f"{param}: a JSON schema must be an object", param=param)
        return lambda: json_grammar(value, param)
    if kind == "regex":
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{param}: a regular expression must be a string, not empty", param=param)
        return lambda: regex_grammar(value, param)
    if kind == "grammar":
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{param}: a grammar must be a string, not empty", param=param)
        return lambda: written_grammar(value, param)
    if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        raise InvalidRequest(f"{param}: a choice must be a list of strings", param=param)
    return lambda: choice_grammar(value, param)


def _parsed(text: str, param: str) -> dict[str, Json]:
    """A schema that comes as text, as vLLM takes it."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{param}: the JSON schema is no JSON", param=param) from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}: a JSON schema must be an object", param=param)
    return schema
