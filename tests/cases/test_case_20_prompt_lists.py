"""Case 20: lists of prompts in the wrong order, under the wrong index, or a server that seems stuck."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases.model_server import ModelServer
from tests.server.sse import events, texts

PROMPTS = ["hello", "a much longer prompt " * 8, "w"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with ModelServer(tmp_path_factory.mktemp("model"), max_waiting=40) as running:
        yield running


def test_case_20_every_choice_belongs_to_its_prompt(server: ModelServer) -> None:
    body: dict[str, Any] = {"n": 2, "echo": True, "max_tokens": 5, "ignore_eos": True, "temperature": 3.0, "seed": 4}
    document = server.complete(PROMPTS, **body)
    choices = document["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for choice in choices:
        assert choice["text"].startswith(PROMPTS[choice["index"] // 2])
    for first, second in zip(choices[::2], choices[1::2], strict=True):
        assert first["text"] != second["text"], "two answers with one seed"
    prompt_tokens = sum(len(server.codec.encode(prompt)) for prompt in PROMPTS)
    usage = document["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, 30)

    chunks = events(server.events("/v1/completions", prompt=PROMPTS, **body, stream_options={"include_usage": True}))
    assert ["".join(texts(chunks, n)) for n in range(6)] == [choice["text"] for choice in choices]
    streamed = chunks[-1]["usage"]
    del streamed["prompt_tokens_details"], usage["prompt_tokens_details"]  # by now the prompts are in the cache
    assert streamed == usage
    assert server.complete(PROMPTS, **body)["choices"] == choices, "the same seed, another answer"


def test_case_20_a_choice_does_not_depend_on_how_many_there_are(server: ModelServer) -> None:
    body: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 3.0, "seed": 11}
    three = [choice["text"] for choice in server.complete("hello", n=3, **body)["choices"]]
    assert server.complete("hello", **body)["choices"][0]["text"] == three[0]
    assert len(set(three)) == 3


def test_case_20_chats_have_choices_too(server: ModelServer) -> None:
    document = server.chat("hello", n=3, best_of=3, max_tokens=6, temperature=3.0, seed=1, ignore_eos=True)
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2]
    assert document["usage"]["completion_tokens"] == 18
    ids = server.codec.encode_chat([{"role": "user", "content": "hello"}])
    assert document["usage"]["prompt_tokens"] == len(ids)


def test_case_20_too_many_are_refused_at_once_and_whole(server: ModelServer) -> None:
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    ) as live:
        lines = live.iter_lines()
        next(lines)
        assert server.complete([[5]] * 5000, status=400, max_tokens=1)["error"]["param"] == "prompt"
        assert server.complete("hello", status=400, n=512)["error"]["param"] == "n"
        assert server.complete(["hello"] * 30, status=400, n=2)["error"]["param"] == "n"
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.complete(["hello"] * 20, n=2, max_tokens=1, ignore_eos=True)["usage"]["completion_tokens"] == 40


def test_case_20_best_of_more_is_said_not_to_be_served(server: ModelServer) -> None:
    assert server.complete("hello", status=400, n=1, best_of=2)["error"]["param"] == "best_of"
