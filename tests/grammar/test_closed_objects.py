"""What a schema does not name is not there, wherever it stands, unless it says otherwise or nothing would be left."""

from typing import Any

import pytest

from bulletserve.grammar.closed_objects import closed
from bulletserve.grammar.texts import json_grammar
from tests.grammar.test_guide import Walk, walk

__all__ = ["walk"]
X: dict[str, Any] = {"properties": {"x": {"type": "integer"}}}
Y: dict[str, Any] = {"properties": {"y": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        (X, '{"x": 1}', '{"z": 1}'),
        ({"type": "object", "properties": {}}, "{}", '{"z": 1}'),
        ({"properties": {"a": X}}, '{"a": {"x": 1}}', '{"a": {"z": 1}}'),
        ({"properties": {"properties": X}}, '{"properties": {"x": 1}}', '{"properties": {"z": 1}}'),
        ({"type": "array", "items": X}, '[{"x": 1}]', '[{"z": 1}]'),
        ({"anyOf": [X, {"type": "null"}]}, "null", '{"z": 1}'),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": X}}, '{"a": {"x": 1}}', '{"a": {"z": 1}}'),
        ({"allOf": [X]}, '{"x": 1}', '{"z": 1}'),
        ({**X, "anyOf": [{"required": ["x"]}]}, '{"x": 1}', '{"x": 1, "z": 1}'),
    ],
)
def test_what_is_not_named_is_not_there(walk: Walk, schema: dict[str, Any], fits: str, does_not: str) -> None:
    grammar = json_grammar(closed(schema), "schema")
    assert walk.accepts(grammar, fits)
    assert not walk.accepts(grammar, does_not)
    assert walk.accepts(json_grammar(schema, "schema"), does_not), "else this says nothing"


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"type": "object"}, '{"z": 1}'),
        ({"properties": {"a": {"type": "object"}}}, '{"a": {"z": 1}}'),
        ({**X, "additionalProperties": True}, '{"z": 1}'),
        ({**X, "patternProperties": {"^z": {}}}, '{"z": 1}'),
        ({"allOf": [X, Y]}, '{"x": 1, "y": 1}'),
        ({**X, "anyOf": [Y]}, '{"x": 1, "y": 1}'),
        ({**X, "$ref": "#/$defs/a~1b", "$defs": {"a/b": Y}}, '{"x": 1, "y": 1}'),
        ({**X, "anyOf": [{"allOf": [{"$ref": "#/$defs/b"}]}], "$defs": {"b": Y}}, '{"x": 1, "y": 1}'),
        ({"enum": [{"properties": {}}]}, '{"properties": {}}'),
    ],
)
def test_what_is_open_or_put_together_stays_so(walk: Walk, schema: dict[str, Any], fits: str) -> None:
    assert walk.accepts(json_grammar(closed(schema), "schema"), fits)


def test_only_the_object_that_is_put_together_stays_open() -> None:
    made = closed({"properties": {"a": {"allOf": [X, Y]}, "b": X | {}}})
    assert made["properties"]["a"] == {"allOf": [X, Y]}
    assert made["properties"]["b"] == {**X, "additionalProperties": False}
    assert made["additionalProperties"] is False


def test_a_schema_that_goes_round_is_walked_once() -> None:
    schema = {"allOf": [X, {"$ref": "#"}], "properties": {"y": {"$ref": "#"}, "z": {"$ref": "#/nothing/0"}}}
    assert closed(schema) == schema
