"""Formats over HTTP: which grammar the engine gets, and that nothing that is said of one is lost without a word."""

from typing import Any

import pytest

from bulletserve.grammar.texts import ANY_OBJECT, json_grammar
from tests.server.conftest import Served
from tests.server.test_requests import error_of

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("response_format", "followed"),
    [
        ({"type": "json_object"}, ANY_OBJECT),
        ({"type": "json_object", "schema": {}}, ANY_OBJECT),
        ({"type": "json_object", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_schema", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}, "x": None}, SCHEMA),
        ({"type": "text", "schema": None}, None),
    ],
)
def test_the_schema_is_followed_wherever_it_stands(
    served: Served, response_format: dict[str, Any], followed: dict[str, Any] | None
) -> None:
    served.say("{}")
    assert served.chat(response_format=response_format).status_code == 200
    grammar = "" if followed is None else json_grammar(followed, "response_format")
    assert served.engine.arrived[-1].grammar == grammar


@pytest.mark.parametrize(
    ("response_format", "named"),
    [
        ({"type": "text", "schema": SCHEMA}, "schema"),
        ({"type": "text", "json_schema": {"schema": SCHEMA}}, "json_schema"),
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "json_schema"),
        ({"type": "json_object", "schema": 5}, "response_format.schema"),
        ({"type": "json_object", "pattern": "a"}, "pattern"),
        ({"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": SCHEMA}}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "regex": "a"}}, "regex"),
        ({"type": "json_schema"}, "json_schema.schema"),
        ({"type": ["json_object"]}, "response_format.type"),
    ],
)
def test_what_would_not_be_heard_is_refused(served: Served, response_format: dict[str, Any], named: str) -> None:
    error = error_of(served.chat(response_format=response_format), 400)
    assert error["param"] == "response_format" and named in error["message"]


def test_blanks_are_not_the_clients_to_choose(served: Served) -> None:
    for body in (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
    ):
        assert "whitespace_pattern is not supported" in error_of(served.chat(**body), 400)["message"]
