"""`/tokenize` tells what the same body has for a prompt on the real path, and `/detokenize` the way back."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.server.conftest import SETTINGS, Served
from tests.server.small_model import small_checkpoint
from tests.server.test_requests import error_of
from tests.server.test_tools import LOOK, SHOWING

TEMPLATE = SHOWING.removesuffix("<|open|>assistant\n") + (
    "{{ mood }}{% if add_generation_prompt %}<|open|>assistant\n{% endif %}"
)
HELLO = {"role": "user", "content": "hello"}
SAID = {"role": "assistant", "content": "hell"}
NAMED = {"type": "function", "function": {"name": "look"}}
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": '{"x": 3}'}}]}
CHATS: tuple[dict[str, Any], ...] = (
    {},
    *({"tools": [LOOK], "tool_choice": choice} for choice in (None, "none", "auto", "required", NAMED)),
    {"tools": [LOOK], "parallel_tool_calls": False, "response_format": None, "chat_template_kwargs": {"mood": "low"}},
    {"messages": [HELLO, CALLED, {"role": "tool", "content": "7"}]},
    {"messages": [HELLO, SAID], "continue_final_message": True},
    {"add_generation_prompt": False},
    {"add_special_tokens": True},
    {"chat_template": "{{ messages[0]['content'] }}{{ tools }}", "tools": [LOOK], "tool_choice": "none"},
    *({"tools": [LOOK], "truncate_prompt_tokens": kept} for kept in (1, 7, -1)),
    {"messages": [HELLO] * 40, "truncate_prompt_tokens": -1, "max_completion_tokens": 100, "max_tokens": 3},
    {"logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}, "n": 2},
    {"temperature": 0.0, "stop": ["x"], "seed": 5, "response_format": {"type": "json_object"}, "metadata": {}},
)
TEXTS: tuple[dict[str, Any], ...] = (
    {},
    {"prompt": "<|open|>a b c d e"},
    {"add_special_tokens": False},
    *({"prompt": "a b c d e", "truncate_prompt_tokens": kept} for kept in (1, 3, 200, -1)),
    {"prompt": "a b" * 200, "truncate_prompt_tokens": -1, "max_tokens": 100},
    {"echo": True, "logprobs": 2, "max_tokens": 1},
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint = small_checkpoint(tmp_path_factory.mktemp("tokenize"), template=TEMPLATE)
    served = Served(checkpoint, replace(SETTINGS, tool_call_parser="hermes", request_templates=True))
    served.say("[]")
    yield served
    served.close()


def same_both_ways(served: Served, path: str, body: dict[str, Any]) -> None:
    told = served.http.post("/tokenize", json=body)
    assert told.status_code == 200, told.text
    answer = served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert told.json()["tokens"] == list(served.engine.arrived[-1].prompt_ids)
    assert told.json()["count"] == len(told.json()["tokens"])


@pytest.mark.parametrize("fields", CHATS)
def test_a_chat_costs_what_is_told(served: Served, fields: dict[str, Any]) -> None:
    same_both_ways(served, "/v1/chat/completions", {"messages": [HELLO], **fields})


@pytest.mark.parametrize("fields", TEXTS)
def test_a_completion_costs_what_is_told(served: Served, fields: dict[str, Any]) -> None:
    same_both_ways(served, "/v1/completions", {"prompt": "hello", **fields})


def test_what_a_request_would_be_refused_for_is_refused(served: Served) -> None:
    for body in (
        {"tools": [{}]},
        {"tools": [LOOK], "tool_choice": "sometimes"},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": 1000},
        {"continue_final_message": True, "add_generation_prompt": True},
    ):
        body |= {"messages": [HELLO]}
        theirs = error_of(served.http.post("/v1/chat/completions", json=body), 400)
        assert error_of(served.http.post("/tokenize", json=body), 400) == theirs


def test_a_prompt_may_be_longer_than_the_context(served: Served) -> None:
    assert served.http.post("/tokenize", json={"prompt": "a b" * 500}).json()["count"] > 256
    assert served.http.post("/tokenize", json={"messages": [HELLO] * 500}).json()["count"] > 256


@pytest.mark.parametrize(("skips", "text"), [(None, "<|open|>he"), (False, "<|open|>he"), (True, "he")])
def test_control_tokens_are_told_back_unless_they_are_not_wanted(served: Served, skips: bool | None, text: str) -> None:
    ids = served.codec.encode("<|open|>he", add_special_tokens=False)
    answer = served.http.post("/detokenize", json={"tokens": ids, "skip_special_tokens": skips})
    assert answer.json()["prompt"] == text
