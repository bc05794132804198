"""Readers find the calls of every format, however the text is cut, and lose no content where there is none."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.server.tool_calls import (
    CallReader,
    CallStart,
    CallText,
    JsonReader,
    ListReader,
    MakeReader,
    MarkedReader,
    NamedReader,
)

quick = settings(max_examples=150, deadline=None)
names = st.text("abcdefgh_", min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[],:é\n <>/', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\{', max_size=3), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text('ab"\\{', max_size=3), values, max_size=3)
calls = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)
content = st.text("abc <>{}\n/tol_", max_size=20).filter(lambda text: "<tool_call>" not in text)


def read(make: MakeReader, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and the name and arguments of each call, of a text that comes in pieces."""
    reader = make()
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    parts = []
    start = 0
    for end in ends:
        parts += reader.push(text[start:end])
        start = end
    parts += reader.finish()
    said = "".join(part for part in parts if isinstance(part, str))
    found: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallStart):
            assert part.call == len(found)
            assert part.id.startswith("call_")
            found.append([part.name, ""])
        elif isinstance(part, CallText):
            assert part.call == len(found) - 1
            found[-1][1] += part.text
    return said, [(name, text) for name, text in found]


MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "{", "}", '"', " ", "\n", "a", "<", ":", ",", "[")
pieces = st.lists(st.integers(0, 200), max_size=12)
layouts = st.sampled_from([(None, (", ", ": ")), (None, (",", ":")), (2, (",", ": "))])


def written(name: str, given: dict[str, object], key: str, layout: tuple[int | None, tuple[str, str]]) -> str:
    return json.dumps({"name": name, key: given}, indent=layout[0], separators=layout[1], ensure_ascii=False)


@given(calls=calls, cuts=pieces, layout=layouts, before=content)
@quick
def test_marked_calls_with_text_before_them(calls, cuts: list[int], layout, before: str) -> None:
    texts = [f"<tool_call>\n{written(name, given, 'arguments', layout)}\n</tool_call>" for name, given in calls]
    said, found = read(MarkedReader, before + "\n".join(texts), cuts)
    assert said == before.rstrip()
    assert [(name, json.loads(text)) for name, text in found] == calls


@given(calls=calls, cuts=pieces, layout=layouts, tag=st.sampled_from(["", "<|python_tag|>", "\n"]))
@quick
def test_bare_calls(calls, cuts: list[int], layout, tag: str) -> None:
    texts = [written(name, given, "parameters", layout) for name, given in calls]
    said, found = read(JsonReader, tag + "; ".join(texts), cuts)
    assert said == ""
    assert [(name, json.loads(text)) for name, text in found] == calls


@given(calls=calls, cuts=pieces, layout=layouts)
@quick
def test_a_list_of_calls(calls, cuts: list[int], layout) -> None:
    texts = [written(name, given, "parameters", layout) for name, given in calls]
    said, found = read(ListReader, "[" + ", ".join(texts) + "]", cuts)
    assert said == ""
    assert [(name, json.loads(text)) for name, text in found] == calls


@given(text=st.lists(st.sampled_from(MARKS)).map("".join), cuts=pieces)
@pytest.mark.parametrize("make", [MarkedReader, JsonReader])
@quick
def test_text_without_a_call_stays_as_it_is(make: MakeReader, text: str, cuts: list[int]) -> None:
    assert read(make, text, cuts) == (text, [])


@given(cuts=pieces)
@quick
def test_what_only_looks_like_a_call_is_content(cuts: list[int]) -> None:
    for text in ('a \n<tool_call> {"name": 3}</tool_call> so', "<tool_call>nothing</tool_call>", ' <tool_call>{"na'):
        assert read(MarkedReader, text, cuts) == (text, [])
    for text in ('{"answer": {"name": "x"}}', ' {"name": ["x"]}', "\n{", '<|python_tag|>{"name": "x', " {x"):
        assert read(JsonReader, text, cuts) == (text, [])


@given(cut=st.integers(20, 60), cuts=pieces)
@quick
def test_a_call_that_is_cut_off_keeps_what_there_is(cut: int, cuts: list[int]) -> None:
    text = '{"name": "look", "arguments": {"where": "under the table", "how": 3}}'
    said, found = read(MarkedReader, "<tool_call>" + text[:cut], cuts)
    assert said == ""
    assert found == [("look", text[30:cut])]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"name": "a", "arguments": "{\\"x\\": 1}"}', '{"x": 1}'),
        ('{"name": "a", "arguments": null}', "{}"),
        ('{"name": "a"}', "{}"),
        ('{"arguments": {"x": 1}, "name": "a"}', '{"x": 1}'),
        ('{"name": "a", "arguments": {"x": 1}, "id": 7}', '{"x": 1}'),
    ],
)
def test_arguments_however_a_model_writes_them(text: str, wanted: str) -> None:
    assert read(JsonReader, text, []) == ("", [("a", wanted)])


def test_arguments_come_as_they_are_written() -> None:
    reader = MarkedReader()
    (start,) = reader.push('<tool_call>{"name": "a", ')
    assert isinstance(start, CallStart)
    assert start.name == "a"
    assert reader.push('"arguments": {"x"') == [CallText(0, '{"x"')]
    assert reader.push(": 1}") == [CallText(0, ": 1}")]
    assert reader.push("}</tool_call>") == []
    assert reader.finish() == []


def test_a_named_tool_gets_all_of_the_text() -> None:
    assert read(lambda: NamedReader("look"), '{"x": 1}', [2, 5]) == ("", [("look", '{"x": 1}')])


def test_no_more_calls_than_allowed() -> None:
    text = '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>'
    assert read(lambda: CallReader(MarkedReader(), 1), text, []) == ("", [("a", "{}")])
