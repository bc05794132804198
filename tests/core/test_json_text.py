import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.json_text import parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=VALUES)
@settings(deadline=None)
def test_what_is_json_is_read(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("text", ["", "{", "NaN", "[Infinity]", '{"a": -Infinity}', "[" * 100_000, '{"a":' * 100_000])
def test_what_is_none_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
