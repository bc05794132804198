"""Case 15: logprobs that are shifted, or whose offsets are wrong."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases.model_server import ModelServer
from tests.server.sse import events

PROMPTS = ("hello world, hello", "\u65e5 \u672c \u00e9t\u00e9 \U0001f600!", "x")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with ModelServer(tmp_path_factory.mktemp("model")) as running:
        yield running


def checked(server: ModelServer, ids: list[int], logprobs: dict[str, Any], text: str, top: int, first: int) -> None:
    """Against the model itself; `ids` are the whole sequence, told of from `first` on."""
    expected = server.logits(ids).log_softmax(-1)
    told = ids[first:]
    assert {len(values) for values in logprobs.values()} == {len(told)}
    for place, token in enumerate(told, first):
        name, value, best, offset = (
            logprobs[field][place - first] for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        piece = server.piece(token)
        assert name == (piece if isinstance(piece, str) else piece.decode(errors="replace"))
        if token not in server.codec.tokenizer.special_ids and isinstance(piece, str):
            assert text[offset:].startswith(piece)
        if place == 0:
            assert value is None and best is None
            continue
        row = expected[place - 1]
        assert value == pytest.approx(float(row[token]), abs=1e-4)
        assert best[name] == pytest.approx(value) or isinstance(piece, bytes)  # several bytes may be written alike
        assert 1 <= len(best) <= top + 1
        if top:
            assert max(best.values()) == pytest.approx(float(row.max()), abs=1e-4)


def merged(chunks: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """A stream's text and logprobs, put together."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    return "".join(choice["text"] for choice in choices), {
        field: [value for part in parts for value in part[field]] for field in parts[0]
    }


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("echo", [True, False])
def test_case_15_completions_against_the_model_itself(server: ModelServer, prompt: str, echo: bool) -> None:
    ids = server.codec.encode(prompt)
    made = server.greedy(ids, 6)
    body: dict[str, Any] = {"max_tokens": 6, "logprobs": 2, "echo": echo, "ignore_eos": True}
    choice = server.complete(prompt, **body)["choices"][0]
    assert choice["text"].startswith(prompt) == echo
    checked(server, ids + made, choice["logprobs"], choice["text"], 2, 0 if echo else len(ids))
    text, logprobs = merged(events(server.events("/v1/completions", prompt=prompt, **body)))
    assert text == choice["text"] and logprobs == choice["logprobs"]


def test_case_15_a_warm_cache_leaves_no_hole(server: ModelServer) -> None:
    prompt = "a prompt that is longer than a block or two"
    server.complete(prompt, max_tokens=1)
    ids = server.codec.encode(prompt)
    for _ in range(2):
        choice = server.complete(prompt, max_tokens=1, echo=True, logprobs=0, ignore_eos=True)["choices"][0]
        checked(server, ids + server.greedy(ids, 1), choice["logprobs"], choice["text"], 0, 0)


def test_case_15_entries_of_a_stop_string_go_with_its_text(server: ModelServer) -> None:
    whole = server.complete("hello", max_tokens=8, logprobs=1, ignore_eos=True)["choices"][0]
    offsets = whole["logprobs"]["text_offset"]
    place = next(n for n in range(2, 8) if offsets[n] > offsets[1])
    stop = whole["text"][offsets[place] :][:2]
    cut = whole["text"].index(stop)
    body: dict[str, Any] = {"max_tokens": 8, "logprobs": 1, "ignore_eos": True, "stop": stop}
    choice = server.complete("hello", **body)["choices"][0]
    assert choice["text"] == whole["text"][:cut] and choice["stop_reason"] == stop
    told = choice["logprobs"]["text_offset"]
    assert told == [offset for offset in offsets if offset < cut]
    assert choice["logprobs"]["token_logprobs"] == whole["logprobs"]["token_logprobs"][: len(told)]
    text, logprobs = merged(events(server.events("/v1/completions", prompt="hello", **body)))
    assert (text, logprobs) == (choice["text"], choice["logprobs"])
    kept = server.complete("hello", **body, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == whole["text"][: cut + len(stop)]


def test_case_15_chats_tell_bytes_and_alternatives(server: ModelServer) -> None:
    body: dict[str, Any] = {"max_tokens": 5, "logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    document = server.chat("hello", **body)
    ids = server.codec.encode_chat([{"role": "user", "content": "hello"}])
    made = server.greedy(ids, 5)
    expected = server.logits(ids + made).log_softmax(-1)[len(ids) - 1 :]
    content = document["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    for row, token, entry in zip(expected, made, content, strict=False):
        piece = server.piece(token)
        assert bytes(entry["bytes"]) == (piece.encode() if isinstance(piece, str) else piece)
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        likeliest = [one["logprob"] for one in entry["top_logprobs"]]
        assert likeliest == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    chunks = events(server.events("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], **body))
    told = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"] is not None]
    assert [entry for part in told for entry in part] == content
    assert server.chat("hello", max_tokens=2)["choices"][0]["logprobs"] is None


def test_case_15_the_drawn_token_is_listed_even_outside_the_likeliest(server: ModelServer) -> None:
    choice = server.complete("hello", max_tokens=30, temperature=2.0, seed=3, logprobs=1, ignore_eos=True)["choices"][0]
    told = choice["logprobs"]
    assert any(len(best) == 2 for best in told["top_logprobs"])
    assert all(name in best for name, best in zip(told["tokens"], told["top_logprobs"], strict=True))
    assert all(
        len(best) == 1
        for best in server.complete("hello", max_tokens=5, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"]
    )


def test_case_15_prompt_logprobs_of_both_endpoints(server: ModelServer) -> None:
    prompt = "hello world"
    ids = server.codec.encode(prompt)
    expected = server.logits(ids).log_softmax(-1)
    told = server.complete(prompt, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert told[0] is None and len(told) == len(ids)
    for place, entry in enumerate(told[1:], 1):
        own = entry[str(ids[place])]
        row = expected[place - 1]
        assert own["logprob"] == pytest.approx(float(row[ids[place]]), abs=1e-4)
        assert own["rank"] == int((row > row[ids[place]]).sum()) + 1
        assert {one["rank"] for one in entry.values()} >= {1, 2}
    chat = server.chat("hello", max_tokens=1, prompt_logprobs=0)
    assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    error = server.complete(prompt, status=400, prompt_logprobs=1, stream=True)["error"]
    assert error["param"] == "prompt_logprobs"


def test_case_15_a_prompt_longer_than_a_range_is_told_of_whole(server: ModelServer) -> None:
    ids = [3 + n % 250 for n in range(200)]
    told = server.complete(ids, max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    expected = server.logits(ids).log_softmax(-1)
    values = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], told[1:], strict=True)]
    assert values == pytest.approx([float(expected[n, ids[n + 1]]) for n in range(199)], abs=1e-4)
