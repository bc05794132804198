"""Case 8: `max_tokens` zero, negative, huge, missing or no number."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases.model_server import CONTEXT, ModelServer
from tests.server.sse import ends, events, texts

WRONG = ["-1", "0", "9223372036854775808", '"12"', "1.5", "true", "[]", "1e400"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with ModelServer(tmp_path_factory.mktemp("model")) as running:
        yield running


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_case_08_what_is_no_length(server: ModelServer, field: str, value: str) -> None:
    bodies = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]}}
    if field == "max_tokens":
        bodies["/v1/completions"] = {"prompt": "hello"}  # type: ignore[dict-item]
    for path, body in bodies.items():
        content = json.dumps(body)[:-1] + f',"{field}":{value}}}'
        response = server.http.post(path, content=content)
        assert response.status_code == 400, response.text
        if len(value) < 5:  # a giant among numbers may be a context that is too long, or no JSON
            assert response.json()["error"]["param"] == field


@pytest.mark.parametrize("excess", [1, 10**9])
def test_case_08_more_than_the_room_names_both_numbers_on_both_endpoints(server: ModelServer, excess: int) -> None:
    prompt = [5] * 10
    room = CONTEXT - len(prompt)
    assert server.complete(prompt, max_tokens=1, ignore_eos=True)["usage"]["completion_tokens"] == 1
    error = server.complete(prompt, status=400, max_tokens=room + excess)["error"]
    assert error["code"] == "context_length_exceeded" and "maximum context length" in error["message"]
    assert str(CONTEXT) in error["message"] and str(room + excess) in error["message"]
    chat = server.chat("hello", status=400, max_tokens=CONTEXT + excess)["error"]
    assert chat["code"] == error["code"] and str(CONTEXT + excess) in chat["message"]


def test_case_08_absent_is_16_or_the_room(server: ModelServer) -> None:
    document = server.complete("hello", ignore_eos=True)
    assert document["usage"]["completion_tokens"] == 16
    assert document["choices"][0]["finish_reason"] == "length"
    usage = server.chat("hello", ignore_eos=True)["usage"]
    assert usage["total_tokens"] == CONTEXT


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_case_08_no_tokens_with_echo_is_the_prompt(server: ModelServer, logprobs: int | None) -> None:
    body: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": logprobs}
    document = server.complete("hello world", **body)
    choice = document["choices"][0]
    assert choice["text"] == "hello world" and choice["finish_reason"] == "length"
    assert document["usage"]["completion_tokens"] == 0
    if logprobs is not None:
        ids = server.codec.encode("hello world")
        told = choice["logprobs"]["token_logprobs"]
        expected = server.logits(ids).log_softmax(-1)
        assert told[0] is None
        assert told[1:] == pytest.approx([float(expected[n, ids[n + 1]]) for n in range(len(ids) - 1)], abs=1e-4)
    chunks = events(server.events("/v1/completions", prompt="hello world", **body))
    assert "".join(texts(chunks)) == "hello world" and ends(chunks) == [(0, "length", None)]
    if logprobs is not None:
        assert chunks[0]["choices"][0]["logprobs"] == choice["logprobs"]


def test_case_08_at_least_so_many_tokens(server: ModelServer) -> None:
    ids = server.codec.encode("hello")
    (first, *_) = server.greedy(ids, 1)
    stopped = server.complete("hello", max_tokens=12, stop_token_ids=[first])
    assert stopped["usage"]["completion_tokens"] == 1 and stopped["choices"][0]["stop_reason"] == first
    longer = server.complete("hello", max_tokens=12, stop_token_ids=[first], min_tokens=5)
    assert longer["usage"]["completion_tokens"] >= 6 or longer["choices"][0]["finish_reason"] == "length"
    free = server.complete("hello", max_tokens=12, ignore_eos=True)["choices"][0]["text"]
    letter = free[0]
    kept = server.complete("hello", max_tokens=12, ignore_eos=True, stop=letter, min_tokens=12)["choices"][0]
    assert kept["text"] == free and kept["finish_reason"] == "length"
    assert server.complete("hello", max_tokens=12, ignore_eos=True, stop=letter)["choices"][0]["text"] == ""
