"""How tokens are counted, whatever the server tells of them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.client.answer_stream import AnswerStream
from bulletserve.telemetry.latency import Answer
from tests.client.fake_server import DONE, event, token, usage


def fed(*parts: bytes, wanted: int = 10) -> AnswerStream:
    """Each part at a second of its own, from 1."""
    stream = AnswerStream(wanted)
    for at, part in enumerate(parts, 1):
        stream.feed(part, float(at))
    stream.close()
    return stream


def chat(finish: str | None = None, **delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def test_an_event_is_a_token_and_usage_confirms_it() -> None:
    stream = fed(token(), token(), token("", finish="length"), usage(2, prompt=7), DONE)
    assert stream.token_times_s() == ([1.0, 2.0], "events, usage")
    assert (stream.prompt_tokens, stream.finish_reason, stream.done, stream.failure) == (7, "length", True, None)


def test_without_usage_events_with_text_are_counted() -> None:
    assert fed(token(), token(), token("", finish="stop"), DONE).token_times_s() == ([1.0, 2.0], "events")


def test_token_ids_say_how_many_an_event_brings() -> None:
    stream = fed(token(token_ids=[1, 2]), token("", token_ids=[3]), token(token_ids=[4, 5, 6]), usage(6), DONE)
    assert stream.token_times_s() == ([1.0, 1.0, 2.0, 3.0, 3.0, 3.0], "token ids")


def test_usage_on_every_event_says_it_too() -> None:
    def at(count: int) -> bytes:
        return event({"choices": [{"text": "x"}], "usage": {"completion_tokens": count, "prompt_tokens": 3}})

    stream = fed(at(2), at(3), at(6), usage(6, prompt=3), DONE)
    assert stream.token_times_s() == ([1.0, 1.0, 2.0, 3.0, 3.0, 3.0], "usage")


def test_a_usage_above_the_events_counts_to_the_last_and_one_below_takes_from_the_end() -> None:
    assert fed(token(), token(), usage(5), DONE).token_times_s()[0] == [1.0, 2.0, 2.0, 2.0, 2.0]
    assert fed(token(), token(""), token(), usage(2), DONE).token_times_s()[0] == [1.0, 2.0]
    assert fed(token(), usage(0), DONE).token_times_s()[0] == []


@pytest.mark.parametrize("claimed", [10**12, -1, 11])
def test_a_mad_usage_is_not_believed(claimed: int) -> None:
    assert fed(token(), token(), usage(claimed), DONE).token_times_s() == ([1.0, 2.0], "events")


def test_a_role_is_no_token_and_reasoning_is_one() -> None:
    stream = fed(
        chat(role="assistant", content=""),
        chat(reasoning_content="hm"),
        chat(content="a"),
        chat(content=""),  # text that is held back
        chat(tool_calls=[{"index": 0}]),
        chat(finish="stop"),
        DONE,
    )
    assert stream.token_times_s() == ([2.0, 3.0, 4.0, 5.0], "events")


def test_other_choices_and_strange_fields_are_let_be() -> None:
    other = event({"choices": [{"index": 1, "text": "b"}], "x": 1, "system_fingerprint": None})
    assert fed(other, token(), event({"choices": []}), event({"choices": None}), DONE).token_times_s()[0] == [2.0]


@pytest.mark.parametrize(
    ("payload", "kind", "message"),
    [
        (b"data: {\n\n", "bad_stream", "cannot be read"),
        (b"data: [1, 2]\n\n", "bad_stream", "cannot be read"),
        (b"data: \xff\xfe\n\n", "bad_stream", "cannot be read"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "bad_stream", "cannot be read"),
        (b'data: {"choices": [{"text": 5}]}\n\n', "bad_stream", "cannot be read"),
        (event({"error": {"message": "engine died", "code": 500}}), "error_event", "engine died"),
        (event({"error": "plain"}), "error_event", "plain"),
        (event({"object": "error", "message": "old form"}), "error_event", "old form"),
    ],
)
def test_what_is_no_answer_is_named(payload: bytes, kind: str, message: str) -> None:
    stream = fed(token(), payload, token(), DONE)
    assert stream.failure is not None
    assert stream.failure.kind == kind and message in stream.failure.message
    assert stream.token_times_s()[0] == [1.0], "nothing counts after it"


def test_an_end_without_done_is_an_end_and_no_end_is_a_cut() -> None:
    assert fed(token(finish="length")).failure is None
    assert fed(token(), DONE).failure is None
    cut = fed(token(), token()).failure
    assert cut is not None and cut.kind == "cut" and "after 2 tokens" in cut.message


def test_a_stream_that_does_not_end_is_ended() -> None:
    stream = fed(token() * 5000)
    assert stream.failure is not None and "does not end" in stream.failure.message


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    gaps=st.lists(st.integers(1, 9), min_size=12, max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_no_figure_depends_on_how_the_tokens_are_counted(counts: list[int], gaps: list[int]) -> None:
    """The same answer told with ids, with usage on every event, and with usage at the end alone."""
    total, prompt = sum(counts), 3
    moments = [float(sum(gaps[: at + 1])) for at in range(len(counts))]

    def answer(*, ids: bool, every: bool) -> Answer:
        stream, so_far = AnswerStream(total), 0
        for moment, count in zip(moments, counts, strict=True):
            so_far += count
            document: dict[str, Any] = {"choices": [{"text": "x", **({"token_ids": [1] * count} if ids else {})}]}
            if every:
                document["usage"] = {"completion_tokens": so_far, "prompt_tokens": prompt}
            stream.feed(b"data: " + json.dumps(document).encode() + b"\n\n", moment)
        stream.feed(usage(total) + DONE, 1e3)
        return Answer(0.0, prompt, stream.token_times_s()[0])

    reference = answer(ids=True, every=False)
    assert len(reference.token_times_s) == total
    for other in (answer(ids=False, every=True), answer(ids=False, every=False)):
        assert other.ttft_s == reference.ttft_s and other.tpot_s == reference.tpot_s
        assert other.whole_s == reference.whole_s
        assert sorted(other.gaps_s) == sorted(reference.gaps_s)
