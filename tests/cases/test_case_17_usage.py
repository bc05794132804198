"""Case 17: usage comes in one last chunk, only when asked, and adds up to what the same call without a stream says."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases.scripted_server import serving
from tests.server.conftest import Served
from tests.server.sse import events
from tests.server.test_requests import error_of

PROMPTS = ["hello", "hello hello w", "a"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("model")) as server:
        yield server


@pytest.fixture(autouse=True)
def answers(served: Served) -> None:
    served.engine.reset()
    served.say("hello world DEF")


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 9}),
    ("/v1/completions", {"prompt": PROMPTS, "max_tokens": 5}),
    ("/v1/completions", {"prompt": PROMPTS, "max_tokens": 50, "stop": "wor"}),
    ("/v1/completions", {"prompt": PROMPTS, "max_tokens": 5, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50, "n": 3}),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize(
    "options", [None, {}, {"include_usage": False}, {"include_usage": True}, {"continuous_usage_stats": True}]
)
def test_case_17_usage_comes_once_when_asked_and_equals_that_without_a_stream(
    served: Served, path: str, body: dict[str, Any], options: dict[str, bool] | None
) -> None:
    whole = served.http.post(path, json=body).json()["usage"]
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
    assert 0 < whole["prompt_tokens_details"]["cached_tokens"] <= whole["prompt_tokens"]
    chunks = events(served.http.post(path, json={**body, "stream": True, "stream_options": options}))
    *before, last = chunks
    asked = bool(options and options.get("include_usage"))
    assert [chunk for chunk in chunks if not chunk["choices"]] == ([last] if asked else [])
    if asked:
        assert last["usage"] == whole
    continuous = bool(options and options.get("continuous_usage_stats"))
    told = [chunk for chunk in (before if asked else chunks) if chunk.get("usage") is not None]
    assert len(told) == (len(chunks) if continuous else 0)
    if continuous:
        by_choice = {chunk["choices"][0]["index"]: chunk["usage"]["completion_tokens"] for chunk in told}
        assert sum(by_choice.values()) == whole["completion_tokens"]


def test_case_17_a_prompt_is_counted_once_for_each_prompt_of_a_list(served: Served) -> None:
    single = [served.post(prompt=prompt, max_tokens=5).json()["usage"] for prompt in PROMPTS]
    together = served.post(prompt=PROMPTS, max_tokens=5).json()["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together[name] == sum(usage[name] for usage in single)


def test_case_17_of_several_answers_the_prompt_is_counted_once(served: Served) -> None:
    one, three = (served.post(max_tokens=5, n=n).json()["usage"] for n in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["prompt_tokens_details"] == one["prompt_tokens_details"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"] == 15


def test_case_17_options_of_a_stream_without_a_stream(served: Served) -> None:
    for options in ({}, {"include_usage": True}, {"include_usage": False}):
        for stream in (None, False):
            error = error_of(served.post(stream=stream, stream_options=options), 400)
            assert error["param"] == "stream_options"


def test_case_17_the_engines_cache_hits_are_those_of_usage(served: Served) -> None:
    """A long prompt has 4 tokens in the scripted engine's cache, a prompt of one token cannot have more than one."""
    assert served.post(prompt=[5] * 40).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert served.post(prompt=[5]).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
