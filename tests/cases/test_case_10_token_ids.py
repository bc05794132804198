"""Case 10: token ids outside of the vocabulary."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases.model_server import VOCABULARY, ModelServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with ModelServer(tmp_path_factory.mktemp("model")) as running:
        yield running


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 2**40, 2**70, True, 1.0, None])
@pytest.mark.parametrize("good", [[], [[5, 6], [7]]])
def test_case_10_prompts(server: ModelServer, wrong: Any, good: list[list[int]]) -> None:
    for prompt in ([5, wrong], [wrong]):
        whole: list[Any] = [*good, prompt] if good else prompt
        error = server.complete(whole, status=400, max_tokens=2)["error"]
        assert error["param"] == "prompt"
        if type(wrong) is int:
            assert str(wrong) in error["message"]
    assert server.state.is_idle, "a part of a refused list runs"


def test_case_10_ids_between_the_tokenizer_and_the_padded_table(server: ModelServer) -> None:
    last = server.codec.vocab_size - 1
    assert last < VOCABULARY - 1
    assert server.complete([last, 5], max_tokens=1, ignore_eos=True)["usage"]["prompt_tokens"] == 2
    assert str(last + 1) in server.complete([last + 1], status=400)["error"]["message"]


def test_case_10_added_tokens_are_valid_everywhere(server: ModelServer) -> None:
    added = server.codec.encode("[added]")[0]
    fields: dict[str, Any] = {"logit_bias": {str(added): 1}, "stop_token_ids": [added], "allowed_token_ids": [added, 5]}
    for name, value in fields.items():
        server.complete([added], max_tokens=1, **{name: value})


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 2**40])
@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_case_10_fields_that_name_ids(server: ModelServer, field: str, wrong: int) -> None:
    value: Any = {str(wrong): 1} if field == "logit_bias" else [5, wrong]
    for document in (
        server.complete("hello", status=400, **{field: value}),
        server.chat("hello", status=400, **{field: value}),
    ):
        assert document["error"]["param"] == field and str(wrong) in document["error"]["message"]


def test_case_10_ids_that_json_writes_oddly(server: ModelServer) -> None:
    for key in (" 5", "5.0", "+5", "\u0665", "", "1e1"):
        assert server.complete("hello", status=400, logit_bias={key: 1})["error"]["param"] == "logit_bias"
    for value in ("NaN", "Infinity", "1e999"):
        content = json.dumps({"prompt": "hello"})[:-1] + f',"logit_bias":{{"5":{value}}}}}'
        assert server.http.post("/v1/completions", content=content).status_code == 400


@pytest.mark.parametrize("temperature", [0, 1])
def test_case_10_rules_that_leave_nothing_are_refused(server: ModelServer, temperature: int) -> None:
    word = server.codec.decode([60])
    body: dict[str, Any] = {"allowed_token_ids": [60], "bad_words": [word], "logprobs": 2, "temperature": temperature}
    error = server.complete("hello", status=400, max_tokens=3, ignore_eos=True, **body)["error"]
    assert error["param"] == "allowed_token_ids" and "bad_words" in error["message"]


def test_case_10_only_what_is_allowed_and_nothing_that_is_banned(server: ModelServer) -> None:
    allowed = [40, 60, 90]
    answer = server.complete("hello", max_tokens=9, allowed_token_ids=allowed, ignore_eos=True)["choices"][0]["text"]
    assert set(answer) <= set(server.codec.decode(allowed)) and len(answer) == 9
    biased = server.complete("hello", max_tokens=9, logit_bias={str(60): 100}, ignore_eos=True)["choices"][0]["text"]
    assert biased == server.codec.decode([60]) * 9
    word = server.codec.decode([60, 61])
    wanted = {"60": 100, "61": 90}
    free = server.complete("hello", max_tokens=4, allowed_token_ids=[60, 61], logit_bias={"61": 1}, ignore_eos=True)
    assert free["usage"]["completion_tokens"] == 4
    for banned in (word[0], word[1]):
        answer = server.complete("hello", max_tokens=9, logit_bias=wanted, bad_words=[banned], ignore_eos=True)
        assert set(answer["choices"][0]["text"]) == set(word) - {banned}
    answer = server.complete("hello", max_tokens=9, logit_bias=wanted, bad_words=[word[0] * 2, word], ignore_eos=True)
    text = answer["choices"][0]["text"]
    assert text[0] == word[0] and word not in text and word[0] * 2 not in text
