"""Structured answers through the whole engine: a model that knows nothing keeps to the format, and harms nobody."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bulletserve.server.settings import ServerSettings
from tests.end_to_end.engine_server import EngineServer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"where": {"$ref": "#/$defs/place"}},
                "required": ["where"],
                "additionalProperties": False,
                "$defs": {"place": {"enum": ["here", "there"]}},
            },
        },
    }
    for name in ("look", "go")
]


def as_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


def check_person(text: str) -> None:
    person = json.loads(text)
    assert person.keys() == {"name", "age"}
    assert len(person["name"]) <= 6
    assert 0 <= person["age"] <= 99


@pytest.fixture(scope="module", params=["static_split", "time_sliced", "chunked_prefill:budget=64"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """Few blocks, so that answers are preempted too."""
    folder = tmp_path_factory.mktemp("small")
    with EngineServer(folder, policy=request.param, num_gpu_blocks_override=60, max_model_len=512) as served:
        yield served


def test_masked_and_free_answers_at_the_same_time(served: EngineServer) -> None:
    """Free answers are those that they would be alone, structured ones fit, whoever is preempted in between."""
    free = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    alone = [served.complete(prompt=f"number {n}", **free)["text"] for n in range(4)]
    masked = {"response_format": as_schema(PERSON), "max_tokens": 200, "temperature": 1.0}
    with ThreadPoolExecutor(12) as pool:
        persons = [pool.submit(served.complete, prompt=f"person {n}", seed=n, **masked) for n in range(8)]
        others = [pool.submit(served.complete, prompt=f"number {n}", **free) for n in range(4)]
        for person in persons:
            choice = person.result()
            assert choice["finish_reason"] == "stop"
            check_person(choice["text"])
        assert [other.result()["text"] for other in others] == alone
    snapshot = served.loop.state
    assert snapshot.is_idle
    assert not snapshot.decoding


def test_the_same_seed_gives_the_same_structured_answer_alone_and_among_others(served: EngineServer) -> None:
    body = {"structured_outputs": {"json": PERSON}, "max_tokens": 200, "seed": 11}
    alone = served.complete(**body)["text"]
    check_person(alone)
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(served.complete, **body) for _ in range(6)]
        assert {answer.result()["text"] for answer in answers} == {alone}


@pytest.mark.parametrize("seed", range(3))
def test_regular_expressions_and_choices(served: EngineServer, seed: int) -> None:
    regex = "[ab]{3}-[0-9]{2}"
    assert re.fullmatch(regex, served.complete(structured_outputs={"regex": regex}, seed=seed)["text"])
    assert re.fullmatch(regex, served.complete(guided_regex=regex, seed=seed, ignore_eos=True)["text"])
    choices = ["yes", "no", "perhaps"]
    assert served.complete(guided_choice=choices, seed=seed)["text"] in choices
    assert served.complete(structured_outputs={"choice": choices}, temperature=0, seed=seed)["text"] in choices


@pytest.mark.parametrize(
    "grammar", ['start: "(" inner ")"\ninner: /[ab]{2}/ | start', 'root ::= "(" ([ab] [ab] | root) ")"']
)
def test_grammars_in_both_forms(served: EngineServer, grammar: str) -> None:
    for name, value in (("structured_outputs", {"grammar": grammar}), ("guided_grammar", grammar)):
        choice = served.complete(**{name: value}, seed=2, temperature=1.0, max_tokens=60)
        depth = choice["text"].count("(")
        assert depth
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(rf"\({{{depth}}}[ab]{{2}}\){{{depth}}}", choice["text"])


def test_any_object(served: EngineServer) -> None:
    answer = served.chat(response_format={"type": "json_object"}, max_tokens=400, seed=5).json()["choices"][0]
    text = answer["message"]["content"]
    assert text.startswith("{")
    assert answer["finish_reason"] == "length" or isinstance(json.loads(text), dict)


@pytest.mark.parametrize("several", [True, False])
def test_required_tools_are_called(served: EngineServer, several: bool) -> None:
    """Blanks between the parts may be as many as a call takes, and a list of calls may go on: it may be cut off."""
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": several, "max_tokens": 400}
    for seed in range(3):
        choice = served.chat(**body, seed=seed).json()["choices"][0]
        calls = choice["message"]["tool_calls"]
        assert calls
        if choice["finish_reason"] == "length":
            calls.pop()
        else:
            assert choice["finish_reason"] == "tool_calls"
        assert several or len(calls) == 1
        for call in calls:
            assert call["function"]["name"] in ("look", "go")
            assert json.loads(call["function"]["arguments"])["where"] in ("here", "there")


def test_a_named_tool_is_called(served: EngineServer) -> None:
    named = {"type": "function", "function": {"name": "go"}}
    choice = served.chat(tools=TOOLS, tool_choice=named, max_tokens=200, seed=4).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "go"
    assert json.loads(call["function"]["arguments"])["where"] in ("here", "there")


def test_a_call_or_an_answer_in_the_format(tmp_path: Path) -> None:
    settings = ServerSettings(("small",), port=0, grace_s=0.5, tool_call_parser="hermes")
    kinds = set()
    with EngineServer(tmp_path, settings, policy="time_sliced", max_model_len=2048) as served:
        for seed in range(40):
            body = {"tools": TOOLS, "parallel_tool_calls": False, "response_format": as_schema(PERSON)}
            body |= {"max_tokens": 1000, "seed": seed}
            choice = served.chat(**body).json()["choices"][0]
            calls = choice["message"].get("tool_calls", [])
            kinds.add(choice["finish_reason"])
            if choice["finish_reason"] == "stop":
                check_person(choice["message"]["content"])
            elif choice["finish_reason"] == "tool_calls":
                assert choice["message"]["content"] is None
                for call in calls:
                    assert call["function"]["name"] in ("look", "go")
                    assert json.loads(call["function"]["arguments"])["where"] in ("here", "there")
            if {"stop", "tool_calls"} <= kinds:
                return
    pytest.fail(f"in forty answers only {kinds}")


def test_what_cannot_be_followed_is_refused_and_harms_nobody(served: EngineServer) -> None:
    refused = [
        {"response_format": as_schema({"type": "nothing"})},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "yaml"}},
        {"response_format": "json"},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"grammar": "start: A"}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"grammar": ""}},
        {"guided_grammar": "root ::= b"},
        {"guided_grammar": "root ::= " + "(" * 5000},
        {"guided_grammar": 'start: "a"' + " " * 20_000},
        {"guided_grammar": ["a"]},
        {"guided_choice": []},
        {"guided_choice": ["a"], "guided_regex": "a"},
    ]
    for body in refused:
        answer = served.http.post("/v1/completions", json={"prompt": "hello", **body})
        assert answer.status_code == 400, body
        assert len(answer.content) < 2000
    assert served.complete(max_tokens=3, ignore_eos=True)["finish_reason"] == "length"
