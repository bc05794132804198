"""Answers and streams over a real socket: shapes, ends, usage, lists of prompts."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulletserve.core.request import Request
from tests.server.conftest import Served
from tests.server.sse import ends, events, texts

LINE_BREAKS = "a\u2028b\u2029c\u0085d\x0be\x1cf\r\n\ng"


def test_a_completion(served: Served) -> None:
    served.say("hello world")
    answer = served.post(max_tokens=50, user="me").json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "small"
    assert answer["choices"] == [
        {"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 6,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_chat(served: Served) -> None:
    served.say("hello world")
    answer = served.chat(max_completion_tokens=4, max_tokens=1, model="small-alias").json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "small-alias"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello worl"}
    assert choice["finish_reason"] == "length"
    (request,) = served.engine.arrived
    assert served.codec.decode(list(request.prompt_ids), skip_special_tokens=False) == (
        "<|open|>user\nhello<|close|>\n<|open|>assistant\n"
    )
    assert answer["usage"]["prompt_tokens"] == len(request.prompt_ids)


def test_a_chat_stream_tells_the_role_with_the_first_token(served: Served) -> None:
    served.say("hello world")
    chunks = events(served.chat(stream=True))
    first, *rest = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert first == {"role": "assistant", "content": "hello"}
    assert [delta["content"] for delta in rest][:4] == [" w", "or", "l", "d"]
    assert not any("role" in delta for delta in rest)
    assert "".join(texts(chunks)) == "hello world"
    assert ends(chunks) == [(0, "stop", None)]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_the_end_rides_on_the_last_token(served: Served) -> None:
    served.say("hello world")
    chunks = events(served.post(stream=True, max_tokens=5))
    assert texts(chunks) == ["hello", " w", "or", "l", "d"]
    assert ends(chunks) == [(0, "length", None)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("per_step", [1, 2])
def test_every_choices_end_rides_on_its_last_token(served: Served, per_step: int) -> None:
    served.say("hello world")
    served.engine.per_step = per_step
    for body in ({"n": 3}, {"prompt": ["a", "b"], "n": 2}):
        chunks = events(served.post(stream=True, max_tokens=5, **body))
        choices = len(ends(chunks))
        for choice in range(choices):
            assert texts(chunks, choice) == ["hello", " w", "or", "l", "d"]
        assert sorted(ends(chunks)) == [(choice, "length", None) for choice in range(choices)]


def test_an_echo_has_the_control_tokens_of_the_prompt(served: Served) -> None:
    prompt = "<|open|>user\nhello<|close|>"
    ids = served.codec.encode(prompt)
    served.say("x")
    for sent in (prompt, ids):
        choice = served.post(prompt=sent, echo=True, max_tokens=1, logprobs=0).json()["choices"][0]
        assert choice["text"] == f"{prompt}x"
        told = choice["logprobs"]
        assert len(told["tokens"]) == len(ids) + 1 and told["tokens"][0] == "<|open|>"
        for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
            assert choice["text"].startswith(token, offset)


def test_an_answer_without_text_still_has_a_role_and_an_end(served: Served) -> None:
    served.say("")
    chunks = events(served.chat(stream=True))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}]
    assert ends(chunks) == [(0, "stop", None)]


def test_tokens_that_come_together_are_events_of_their_own(served: Served) -> None:
    served.say("hello world")
    served.engine.per_step = 10
    assert texts(events(served.post(stream=True, max_tokens=5))) == ["hello", " w", "or", "l", "d"]


def test_no_line_break_of_any_kind_gets_into_an_event(served: Served) -> None:
    served.say(LINE_BREAKS)
    response = served.post(stream=True, max_tokens=100)
    assert "".join(texts(events(response))) == LINE_BREAKS
    assert all(line.startswith("data: ") for line in response.text.splitlines() if line)


def test_special_tokens_are_shown_only_when_asked(served: Served) -> None:
    served.say("hello<|close|>")
    assert served.post().json()["choices"][0]["text"] == "hello"
    assert served.post(skip_special_tokens=False).json()["choices"][0]["text"] == "hello<|close|>"


def test_an_emoji_begun_in_the_prompt(served: Served) -> None:
    ids = served.codec.encode("hello \U0001f469 there")
    split = ids.index(served.codec.encode("\U0001f469")[0]) + 2
    served.engine.script = lambda request: ids[split:]
    body = {"prompt": ids[:split], "max_tokens": 50}
    chunks = events(served.post(stream=True, **body))
    assert "".join(texts(chunks)) == "\U0001f469 there" == served.post(**body).json()["choices"][0]["text"]


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("ABCDEFGHIJ", {"stop": ["DEFGHIJ"]}, ("ABC", "stop", "DEFGHIJ", 8)),
        ("ABCDEFGX", {"stop": "DEFGHIJ"}, ("ABCDEFGX", "stop", None, 8)),
        ("ABCDEFGH", {"stop": ["CDX", "EFGH", "FG"]}, ("ABCDE", "stop", "FG", 6)),
        ("ABCDEFGHI", {"stop": ["GHI", "DEFGHI"]}, ("ABC", "stop", "DEFGHI", 7)),
        ("hello", {"max_tokens": 1}, ("hello", "length", None, 1)),
        ("hello", {"max_tokens": 2}, ("hello", "stop", None, 2)),
        ("hello<|end|> more", {"ignore_eos": True, "max_tokens": 3}, ("hello ", "length", None, 3)),
        ("hello[added]", {"stop_token_ids": ["[added]"]}, ("hello", "stop", "[added]", 2)),
        ("hello<|end|>x", {"ignore_eos": True, "stop_token_ids": ["<|end|>"]}, ("hello", "stop", "<|end|>", 2)),
        ("aDE", {"stop": ["DEF"], "max_tokens": 2}, ("aDE", "length", None, 2)),
    ],
)
def test_ends_of_answers(
    served: Served, text: str, options: dict[str, object], expected: tuple[str, str, object, int]
) -> None:
    shown, reason, stop_reason, tokens = expected
    id_of = {name: served.codec.encode(name)[0] for name in ("[added]", "<|end|>")}
    if "stop_token_ids" in options:
        options = {**options, "stop_token_ids": [id_of["[added]" if "added" in text else "<|end|>"]]}
        stop_reason = options["stop_token_ids"][0]  # type: ignore[index]
    served.say(text)
    answer = served.post(**{"max_tokens": 100, **options}).json()
    chunks = events(served.post(**{"max_tokens": 100, **options}, stream=True, stream_options={"include_usage": True}))
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (shown, reason, stop_reason)
    assert ("".join(texts(chunks)), ends(chunks)) == (shown, [(0, reason, stop_reason)])
    assert answer["usage"]["completion_tokens"] == tokens == chunks[-1]["usage"]["completion_tokens"]


def test_a_matched_stop_string_ends_the_request_in_the_engine(served: Served) -> None:
    served.engine.script = lambda request: served.codec.encode("ab") * 100
    served.engine.pause_s = 0.01
    assert served.post(stop="bab", max_tokens=200).json()["choices"][0]["text"] == "a"
    served.wait_until(lambda: not served.engine.running)
    assert served.engine.aborted == [served.engine.arrived[0].id]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(alphabet="abc\u00e9\U0001f600", max_size=20),
    st.lists(st.text(alphabet="abc\u00e9", min_size=1, max_size=4), max_size=3),
)
def test_a_stream_says_what_the_whole_answer_says(served: Served, text: str, stops: list[str]) -> None:
    served.say(text)
    whole = served.post(stop=stops, max_tokens=100).json()
    chunks = events(served.post(stop=stops, max_tokens=100, stream=True, stream_options={"include_usage": True}))
    (choice,) = whole["choices"]
    assert "".join(texts(chunks)) == choice["text"]
    assert ends(chunks) == [(0, choice["finish_reason"], choice["stop_reason"])]
    assert chunks[-1]["usage"] == whole["usage"]
    assert not any(stop in choice["text"] for stop in stops)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_usage_that_nobody_asked_for(served: Served, options: dict[str, bool] | None) -> None:
    served.say("hello")
    assert all(chunk["choices"] for chunk in events(served.post(stream=True, stream_options=options)))


def test_usage_at_the_end_of_a_stream(served: Served) -> None:
    served.say("hello world")
    chunks = events(served.chat(stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == served.chat().json()["usage"]


def test_usage_on_every_event(served: Served) -> None:
    served.say("hello world")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(served.post(stream=True, max_tokens=5, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 5]
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, 1, 1, 0]


def test_usage_counts_tokens_that_are_held_back(served: Served) -> None:
    served.say("\U0001f469x")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(served.post(stream=True, max_tokens=5, stream_options=options))
    assert texts(chunks) == ["\U0001f469", "x"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [4, 5, 5]


PROMPTS = ["a", "hello world hello", "bb"]


def echo(request: Request) -> list[int]:
    return list(request.prompt_ids)


def test_a_list_of_prompts_keeps_its_order(served: Served) -> None:
    served.engine.script = echo
    answer = served.post(prompt=PROMPTS, max_tokens=50).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(PROMPTS))
    prompt_tokens = sum(len(served.codec.encode(prompt)) for prompt in PROMPTS)
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["completion_tokens"] == prompt_tokens + 3

    options = {"include_usage": True}
    chunks = events(served.post(prompt=PROMPTS, max_tokens=50, stream=True, stream_options=options))
    assert ["".join(texts(chunks, choice)) for choice in range(3)] == PROMPTS
    assert sorted(ends(chunks)) == [(n, "stop", None) for n in range(3)]
    assert chunks[-1]["usage"] == answer["usage"]


def test_prompts_of_ids(served: Served) -> None:
    served.engine.script = echo
    ids = [served.codec.encode(prompt) for prompt in PROMPTS]
    assert served.post(prompt=ids[1]).json()["choices"][0]["text"] == PROMPTS[1]
    assert [c["text"] for c in served.post(prompt=ids).json()["choices"]] == PROMPTS
    assert list(served.engine.arrived[0].prompt_ids) == ids[1]


def test_parts_of_a_message_are_one_text(served: Served) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert served.chat(messages=[{"role": "user", "content": parts}]).status_code == 200
    assert served.chat(messages=[{"role": "user", "content": "hel\nlo"}]).status_code == 200
    first, second = served.engine.arrived
    assert first.prompt_ids == second.prompt_ids


def test_a_refusal_that_comes_back_is_text(served: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert served.chat(messages=[{"role": "assistant", "content": parts}], max_tokens=1).status_code == 200
    ids = served.codec.encode_chat([{"role": "assistant", "content": "a\nb"}])
    assert list(served.engine.arrived[0].prompt_ids) == ids


def test_what_reaches_the_engine(served: Served) -> None:
    served.say("hello")
    served.post(
        temperature=0, top_p=0.5, top_k=-1, seed=-5, max_tokens=7, stop_token_ids=[9], priority=-3, cache_salt="s"
    )
    served.post()
    served.chat(ignore_eos=True, seed=None)
    asked, plain, chat = served.engine.arrived
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed, asked.max_tokens) == (0, 0.5, 0, -5, 7)
    assert (asked.stop_ids, asked.priority, asked.cache_salt) == ({0, 9}, -3, "s")
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.7, 1.0, 50)  # the checkpoint's own, then vLLM's
    assert plain.max_tokens == 16
    assert chat.stop_ids == frozenset()
    assert chat.max_tokens == 256 - len(chat.prompt_ids)
    assert plain.seed != chat.seed
    assert len({asked.id, plain.id, chat.id}) == 3


def test_texts_that_go_to_a_worker_are_tokenised_like_short_ones(served: Served) -> None:
    text = "hello " * 100
    assert served.post(prompt=[text] * 8, max_tokens=1).status_code == 200  # 4,800 characters
    assert served.post(prompt=text, max_tokens=1).status_code == 200
    assert len(served.engine.arrived) == 9
    assert len({tuple(request.prompt_ids) for request in served.engine.arrived}) == 1
