"""`multipleOf` with few digits is followed; with many it is refused at once, wherever it is written."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from bulletserve.core.errors import InvalidRequest
from bulletserve.grammar.multiples import MOST, too_many_multiples
from bulletserve.grammar.texts import json_grammar, limits, written_grammar


def number(multiple: float) -> dict[str, Any]:
    return {"type": "number", "multipleOf": multiple}


def objects(*multiples: float) -> dict[str, Any]:
    return {"type": "object", "properties": {f"n{n}": number(each) for n, each in enumerate(multiples)}}


@pytest.mark.parametrize(
    "schema",
    [number(0.01), number(5), objects(0.25, 0.05, 15, 60, 24), number(7_000_000), number(1e-9)],
)
def test_usual_numbers_are_followed(schema: dict[str, Any]) -> None:
    began_s = time.process_time()
    matcher = LLMatcher(LLTokenizer("byte"), json_grammar(schema, "schema"), log_level=0, limits=limits())
    matcher.compute_bitmask()
    assert not matcher.is_error()
    assert time.process_time() - began_s < 5


@pytest.mark.parametrize(
    "schema",
    [
        number(2999999),
        number(0.2999999),
        objects(997, 991),
        {"allOf": [number(997), {"anyOf": [number(991)]}]},
        {"anyOf": [number(4999 - 2 * n) for n in range(20)]},
        {"type": "object", "$defs": {"a": {"items": number(100003)}}, "properties": {"b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_too_many_remainders_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"multipleOf .* may have {MOST} as their least common multiple"):
        json_grammar(schema, "schema")
    with pytest.raises(InvalidRequest, match="least common multiple"):
        written_grammar(f"start: n\nn: %json {json.dumps(schema)}", "grammar")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner)
       | st.dictionaries(st.text() | st.just("multipleOf"), inner)))  # fmt: skip
def test_any_value_is_judged(value: Any) -> None:
    assert isinstance(too_many_multiples(value), str)
