"""Traces as they were recorded, texts, and lengths by rule."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.errors import ConfigError
from bulletserve.workload.length_rule import LengthRule, drawn_requests
from bulletserve.workload.recipe import read_trace
from bulletserve.workload.request_list import RequestLengths
from bulletserve.workload.sharegpt import Exchange, estimated_tokens, read_sharegpt
from bulletserve.workload.traces import read_trace_file

TRACES = Path(__file__).parents[3] / "shared" / "traces"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not here")
@pytest.mark.parametrize(("name", "count"), [("azure_code_2023", 8819), ("azure_conv_2023", 19366)])
def test_the_published_azure_traces(name: str, count: int) -> None:
    trace = read_trace_file(TRACES / f"{name}.csv")
    assert len(trace.requests) == count and trace.blocks == ()
    assert trace.requests[0].arrival_s == 0.0
    assert 3400 < trace.requests[-1].arrival_s < 3700, "an hour"
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(trace.requests))
    lengths = {(r.prompt_tokens, r.output_tokens) for r in trace.requests}
    assert set(read_trace(TRACES / f"{name}.csv")) & lengths


def test_azure_times_are_read_to_the_microsecond_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    rows = "2023-11-16 23:59:59.9000000,10,2\n2023-11-17 00:00:00.1500001,20,0\n2023-11-16 23:59:58,30,4\n"
    path.write_text(AZURE + rows + "2024-05-10 00:00:00.009930+00:00,5,6\n")
    first, second, third, fourth = read_trace_file(path).requests
    assert (first, second) == (RequestLengths(0.0, 30, 4), RequestLengths(pytest.approx(1.9), 10, 2))
    assert third.arrival_s == pytest.approx(2.15, abs=1e-6) and third.output_tokens == 1, "an answer has a token"
    assert fourth.prompt_tokens == 5


def mooncake(**changes: object) -> str:
    row = {"timestamp": 27_000, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]} | changes
    return json.dumps({key: value for key, value in row.items() if value is not None}) + "\n"


def test_mooncake_rows_have_their_blocks(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(mooncake(timestamp=30_500, hash_ids=[46, 9]) + mooncake() + "\n")
    trace = read_trace_file(path)
    assert trace.requests == (RequestLengths(0.0, 600, 52), RequestLengths(3.5, 600, 52))
    assert trace.blocks == ((46, 47), (46, 9))
    assert trace.first(1).blocks == ((46, 47),) and len(trace.first(None).requests) == 2
    path.write_text(mooncake(hash_ids=None))
    assert read_trace_file(path).blocks == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no trace"),
        ("a,b\n1,2\n", "is no trace"),
        (AZURE, "holds no requests"),
        (AZURE + "yesterday,1,2\n", "line 2"),
        (AZURE + "2023-11-16 18:15:46.68x,1,2\n", "line 2"),
        (AZURE + "2023-11-16 18:15:46,1\n", "line 2"),
        (AZURE + "2023-11-16 18:15:46,-1,2\n", "line 2"),
        (mooncake() + "{\n", "line 2"),
        (mooncake(input_length="600"), "line 1"),
        (mooncake(input_length=None), "line 1"),
        (mooncake(timestamp=float("inf")), "line 1"),
        (mooncake(hash_ids=[1]), "1 hash ids for 600 tokens"),
        (mooncake(hash_ids=[1, -2]), "whole numbers"),
        (mooncake(hash_ids=7), "line 1"),
    ],
)
def test_a_broken_trace_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace_file(path)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace_file(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace_file(tmp_path / "binary")


def talk(*turns: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": what} for who, what in turns]}


def test_conversations_in_which_a_human_begins_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "talks.json"
    entries = [
        talk(("human", "hello"), ("gpt", "hi there"), ("human", "more")),
        talk(("gpt", "I begin"), ("human", "no")),
        talk(("human", "alone")),
        talk(("human", "  "), ("gpt", "x")),
        {"conversations": None},
        "noise",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [3, 4]},
    ]
    expected = (Exchange("hello", "hi there"), Exchange("a", "b"))
    path.write_text(json.dumps(entries))
    assert read_sharegpt(path) == expected
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    assert read_sharegpt(path) == expected
    assert estimated_tokens("x" * 400) == 100 and estimated_tokens("") == 1


@pytest.mark.parametrize("text", ["", "[]", "[1]", "{", "[{]", "[" * 100_000])
def test_a_file_without_conversations_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "talks.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"talks\.json"):
        read_sharegpt(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sharegpt(tmp_path / "none.json")


@given(low=st.integers(1, 500), more=st.integers(0, 500), seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_lengths_are_within_their_range(low: int, more: int, seed: int) -> None:
    rule = LengthRule.parse(f"{low}-{low + more}" if more else str(low))
    made = drawn_requests(20, rule, LengthRule.parse("7"), seed)
    assert all(low <= r.prompt_tokens <= low + more and r.output_tokens == 7 for r in made)
    assert made == drawn_requests(20, rule, LengthRule.parse("7"), seed)
    assert [r.arrival_s for r in made] == [float(n) for n in range(20)]


def test_lognormal_lengths_have_their_median_and_spread() -> None:
    rule, rng = LengthRule.parse("lognormal:800:0.5"), random.Random(1)
    drawn = sorted(rule.draw(rng) for _ in range(4000))
    assert drawn[2000] == pytest.approx(800, rel=0.05)
    assert drawn[int(0.8413 * 4000)] == pytest.approx(800 * 2.71828**0.5, rel=0.06)
    assert all(40 <= length <= 16000 for length in drawn)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "9-3", "many", "1e3", "2000000", "lognormal:800", "lognormal:x:1"]
    + ["lognormal:9:-1", "lognormal:nan:1", "lognormal:0:1"],
)
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(ConfigError, match="a length is"):
        LengthRule.parse(text)
