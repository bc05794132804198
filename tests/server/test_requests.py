"""What is refused, with which status and which field named, before the engine hears of it."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from bulletserve.formats.description import GenerationDefaults
from bulletserve.server.protocol import CompletionBody, sampling_params
from tests.server.broken_bodies import DEEP, NO_REQUESTS
from tests.server.conftest import SETTINGS, Served
from tests.server.small_model import small_checkpoint

MANY = 10_000


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, checked for its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 2000
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["message"], str)
    return dict(error)


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], ["a", ""], [[1], []], None, 5, True, {}, [None], [["a"]], ["a", 1], [1, "a"], [[1], "a"]],
)
def test_prompts_that_are_none(served: Served, prompt: object) -> None:
    assert error_of(served.post(prompt=prompt), 400)["param"] == "prompt"
    assert served.engine.arrived == []


@pytest.mark.parametrize("bad", [-1, 2**40, 10**30, True, 1.0, "VOCAB"])
def test_ids_outside_the_vocabulary(served: Served, bad: object) -> None:
    bad = served.codec.vocab_size if bad == "VOCAB" else bad
    for prompt in ([5, bad], [[5], [5, bad]]):
        error = error_of(served.post(prompt=prompt), 400)
        assert error["param"] == "prompt"
        if type(bad) is int and bad < 2**63:
            assert str(bad) in error["message"]
    error_of(served.post(stop_token_ids=[bad]), 400)
    assert served.engine.arrived == []


def test_added_tokens_are_in_the_vocabulary(served: Served) -> None:
    served.say("hello")
    last = served.codec.vocab_size - 1
    assert served.post(prompt=[last], stop_token_ids=[last]).status_code == 200


@pytest.mark.parametrize("value", [-1, 0, "12", 1.5, True, [1], 2**63])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_that_are_none(served: Served, name: str, value: object) -> None:
    assert error_of(served.chat(**{name: value}), 400)["param"] in (name, "messages")


def test_the_context_is_a_limit_on_prompt_and_answer(served: Served) -> None:
    served.engine.script = lambda request: [5] * 300
    room = 256
    assert served.post(prompt=[5] * (room - 1), max_tokens=1).status_code == 200
    assert served.post(prompt=[5] * (room - 1)).json()["usage"]["completion_tokens"] == 1  # the default gives way
    for length, wanted in ((room, 1), (room, None), (room + 1, None), (room - 1, 2), (10 * room, 1), (1, 10**9)):
        error = error_of(served.post(prompt=[5] * length, max_tokens=wanted), 400)
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length" in error["message"]
        assert "256" in error["message"]
        assert str(length) in error["message"]
    chat = error_of(served.chat(max_tokens=250), 400)
    assert chat["code"] == "context_length_exceeded"
    assert "maximum context length" in chat["message"]
    assert served.chat().json()["choices"][0]["finish_reason"] == "length"


def test_a_hopeless_text_is_not_tokenised(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(text: str, **options: object) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(served.codec.tokenizer, "encode", encode)
    error = error_of(served.post(prompt="x " * 90_000), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "messages",
    [
        "hello",
        [],
        None,
        [None],
        ["x"],
        [{}],
        [{"role": "user"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "ok"}, {"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}],
        [{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}],
        [{"role": "narrator", "content": "x"}],
    ],
)
def test_messages_that_are_none(served: Served, messages: object) -> None:
    assert error_of(served.chat(messages=messages), 400)["param"] == "messages"
    assert served.engine.arrived == []


def test_a_template_speaks_for_itself(served: Served) -> None:
    error = error_of(served.chat(messages=[{"role": "narrator", "content": "x"}]), 400)
    assert "no narrators here" in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 1e400),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("seed", "1"),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop", ["a", None]),
        ("stop", "a" * 1001),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["5"]),
        ("ignore_eos", 1),
        ("stream", "true"),
        ("stream_options", {"include_usage": True}),
        ("stream_options", []),
        ("priority", 2**31),
        ("cache_salt", ""),
        ("model", 5),
    ],
)
def test_values_out_of_range_or_type(served: Served, name: str, value: object) -> None:
    content = json.dumps({"prompt": "hello", name: value})
    response = served.http.post("/v1/completions", content=content)
    assert error_of(response, 400)["param"] == name


def test_too_long_lists_are_told_their_limit(served: Served) -> None:
    for name, value, most in (("stop", ["a"] * 17, 16), ("stop_token_ids", [1] * 1025, 1024)):
        error = error_of(served.post(**{name: value}), 400)
        assert error["param"] == name and f"at most {most}" in error["message"]


def test_more_answers_than_may_wait_are_laid_to_n(served: Served) -> None:
    for prompt in ("hello", ["a", "b"]):
        error = error_of(served.post(prompt=prompt, n=9), 400)
        assert error["param"] == "n" and "n=9" in error["message"]
    error = error_of(served.chat(n=9), 400)
    assert error["param"] == "n"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 129, "1", True, 1.5]),
        ("best_of", [2, 0]),
        ("echo", [1]),
        ("logprobs", [-1, 21, True, "2"]),
        ("prompt_logprobs", [-1, 21, True]),
        ("min_p", [-0.1, 1.1, "0"]),
        ("presence_penalty", [2.1, -3]),
        ("frequency_penalty", [2.1, "x"]),
        ("repetition_penalty", [0, -1, 1e9]),
        ("min_tokens", [-1, 17, 1.5]),
        ("logit_bias", [{"5": 101}, {"five": 1}, {"-1": 1}, {"270": 1}, {"5": "1"}, [], {str(2**80): 1}]),
        ("allowed_token_ids", [[-1], [270], [1.5], 5, [True]]),
        ("stop_token_ids", [[270]]),
        ("bad_words", [[""], [5], "x", ["x" * 40]]),
        ("include_stop_str_in_output", [1]),
    ],
)
def test_sampling_fields_out_of_range_or_type(served: Served, name: str, values: list[object]) -> None:
    for value in values:
        assert error_of(served.post(**{name: value}), 400)["param"] == name, value


def test_chat_alternatives_need_logprobs(served: Served) -> None:
    assert error_of(served.chat(top_logprobs=3), 400)["param"] == "top_logprobs"
    for several in (21, -1):
        error = error_of(served.chat(logprobs=True, top_logprobs=several), 400)
        assert error["param"] == "top_logprobs" and error["message"].startswith("top_logprobs must be")
    assert error_of(served.chat(logprobs=5), 400)["param"] == "logprobs"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("suffix", ["x"]),
        ("chat_template", ["x"]),
    ],
)
def test_fields_that_are_not_served_yet_are_not_ignored(served: Served, name: str, values: list[object]) -> None:
    for value in values:
        error = error_of(served.chat(**{name: value}), 400)
        assert error["param"] == name
        assert name in error["message"]


def test_fields_that_ask_for_nothing_are_fine(served: Served) -> None:
    served.say("hello")
    nothing = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "logprobs": None,
        "min_p": 0.0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "suffix": None,
        "stream_options": None,
        "min_tokens": 0,
        "stop": None,
        "max_tokens": None,
        "temperature": None,
    }
    assert served.post(**nothing).status_code == 200
    assert served.chat(**nothing, top_logprobs=0).status_code == 200


def test_fields_that_nobody_knows_are_named_once_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.say("hello")
    for _ in range(3):
        assert served.post(nobody_knows_this=1, metadata={}, store=True, service_tier="x").status_code == 200
    assert caplog.text.count("nobody_knows_this") == 1
    assert "metadata" not in caplog.text


@pytest.mark.parametrize("name", ["other", "", "small/", "/models/small", "SMALL"])
def test_models_that_are_not_served(served: Served, name: str) -> None:
    for error in (error_of(served.post(model=name), 404), error_of(served.chat(model=name), 404)):
        assert error["param"] == "model"
        assert error["code"] == "model_not_found"
        assert "small, small-alias" in error["message"]


def test_chat_template_kwargs(served: Served) -> None:
    served.say("hello")
    assert served.chat(chat_template_kwargs={"enable_thinking": False}).status_code == 200
    assert served.chat(add_generation_prompt=False).status_code == 200
    with_prompt, without = served.engine.arrived
    assert len(without.prompt_ids) < len(with_prompt.prompt_ids)
    assert error_of(served.chat(chat_template_kwargs={"messages": []}), 400)["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    "content",
    [
        *NO_REQUESTS,
        b'{"metadata": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "temperature": NaN}',
    ],
)
def test_bodies_that_are_no_request(served: Served, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        error_of(served.http.post(path, content=content), 400)
    assert served.engine.arrived == []


def test_the_last_of_two_equal_keys_counts(served: Served) -> None:
    served.say("hello")
    content = b'{"prompt": "hello", "max_tokens": 0, "max_tokens": 1}'
    assert served.http.post("/v1/completions", content=content).json()["usage"]["completion_tokens"] == 1


def test_content_types(served: Served) -> None:
    served.say("hello")
    content = b'{"prompt": "hello"}'
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/xml"):
        error_of(served.http.post("/v1/completions", content=content, headers={"content-type": kind}), 415)
    for headers in (
        {},
        {"content-type": "application/json; charset=utf-8"},
        {"content-type": "application/vnd.x+json"},
    ):
        assert served.http.post("/v1/completions", content=content, headers=headers).status_code == 200


def test_paths_and_methods(served: Served) -> None:
    error_of(served.http.get("/v1/completions"), 405)
    error_of(served.http.post("/health"), 405)
    error_of(served.http.get("/v1/embeddings"), 404)
    error_of(served.http.get("/docs"), 404)
    assert served.http.get("/v1//models/").json() == served.http.get("/v1/models").json()


def test_wrong_items_by_the_thousand_make_a_small_error(served: Served) -> None:
    error_of(served.chat(messages=[None] * MANY), 400)
    error_of(served.post(stop=[5] * MANY), 400)
    error_of(served.post(max_tokens="9" * 100_000), 400)
    error_of(served.post(model="m" * 100_000), 404)
    error_of(served.post(**{"x" * 100_000: 1, "suffix": "x"}), 400)
    error_of(served.post(**{f"field {n}": n for n in range(MANY)}), 400)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit(served: Served, chunked: bool) -> None:
    piece = b" " * 10_000
    pieces = SETTINGS.body_limit_bytes // len(piece) + 1
    content = (piece for _ in range(pieces)) if chunked else piece * pieces
    assert (
        str(SETTINGS.body_limit_bytes) in error_of(served.http.post("/v1/completions", content=content), 413)["message"]
    )
    assert served.http.get("/ping").status_code == 200


def test_request_ids_come_back(served: Served) -> None:
    assert served.http.get("/ping", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert served.http.get("/nothing", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = served.http.get("/ping", headers={"x-request-id": "x" * 500}).headers["x-request-id"]
    assert len(made) == 32


def test_api_keys(guarded: Served) -> None:
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic sk-two"}, {"authorization": "sk-two"}):
        response = guarded.http.get("/v1/models", headers=headers)
        assert error_of(response, 401)["type"] == "authentication_error"
    for key in ("key one", "sk-two"):
        assert guarded.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert guarded.http.get(path).status_code == 200
    error_of(guarded.http.get("//v1//models"), 401)


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    served = Served(small_checkpoint(tmp_path, template=None))
    try:
        assert "--chat-template" in error_of(served.chat(), 400)["message"]
        assert served.post().status_code == 200
    finally:
        served.close()


def test_tokenising_a_long_text_holds_up_nobody(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def encode(text: str, **options: object) -> list[int]:
        begun.set()
        assert go_on.wait(10)
        return [5]

    monkeypatch.setattr(served.codec.tokenizer, "encode", encode)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(served.post, prompt=["hello " * 100] * 8)
        assert begun.wait(10)
        assert served.http.get("/health").status_code == 200
        assert served.post(prompt=[5, 6]).status_code == 200
        go_on.set()
        assert answer.result().status_code == 200


def test_what_a_template_must_go_through_is_not_only_contents(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def render(*_: object) -> str:
        threads.add(threading.current_thread().name.partition("_")[0])
        return "hello"

    monkeypatch.setattr(served.codec, "render_chat", render)
    for body in (
        {"chat_template_kwargs": {"documents_of_mine": [{"text": "a" * 5000}]}},
        {"messages": [{"role": "user", "content": "a", "name": "b" * 5000}]},
        {"messages": [{"role": "user", "content": "a"}] * 3000},
    ):
        assert served.chat(**body, max_tokens=1).status_code == 200
    assert threads == {"tokenize"}


def test_defaults_of_the_checkpoint_hold_for_those_who_say_nothing(served: Served) -> None:
    defaults = GenerationDefaults(min_p=0.1, repetition_penalty=1.05)
    params = sampling_params(CompletionBody(prompt="hello", min_p=0.2), defaults)
    assert (params.min_p, params.repetition_penalty) == (0.2, 1.05)
