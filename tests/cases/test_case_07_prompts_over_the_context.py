"""Case 7: a prompt over the context is refused at once with both numbers, and shortened only on request."""

from collections.abc import Iterator

import pytest

from tests.cases.scripted_server import serving
from tests.server.conftest import Served
from tests.server.test_requests import error_of

CONTEXT = 256


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("model")) as server:
        server.engine.script = lambda request: server.codec.encode("a") * CONTEXT
        yield server


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("wanted", [1, None])
@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_case_07_the_limit_is_exact(served: Served, length: int, wanted: int | None, text: bool) -> None:
    prompt: object = "a" * length if text else served.codec.encode("a") * length
    answer = served.post(prompt=prompt, max_tokens=wanted)
    if length < CONTEXT:
        assert answer.json()["usage"] == {
            "prompt_tokens": length,
            "completion_tokens": 1,
            "total_tokens": CONTEXT,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
    else:
        error = error_of(answer, 400)
        assert error["code"] == "context_length_exceeded"
        hopeless = text and length == 10 * CONTEXT  # told without tokenising it, so the number is a bound
        for word in ("maximum context length", str(CONTEXT), "at least" if hopeless else str(length)):
            assert word in error["message"]
    assert served.post(max_tokens=1).status_code == 200  # the canary


@pytest.mark.parametrize("prompt", ["a" * 10 * CONTEXT, [70] * (CONTEXT + 1)])
def test_case_07_a_refusal_waits_for_nobody(served: Served, prompt: object) -> None:
    """It comes while the engine stands still, so it comes at once."""
    served.engine.held = True
    try:
        assert error_of(served.post(prompt=prompt), 400)["code"] == "context_length_exceeded"
    finally:
        served.engine.held = False


@pytest.mark.parametrize(
    ("most", "wanted", "left"), [(5, None, 5), (5, 100, 5), (-1, 100, 156), (-1, None, 255), (255, 1, 255)]
)
def test_case_07_a_prompt_is_shortened_from_the_left_on_request(
    served: Served, most: int, wanted: int | None, left: int
) -> None:
    prompt = [5 + n % 200 for n in range(10 * CONTEXT)]
    answer = served.post(prompt=prompt, truncate_prompt_tokens=most, max_tokens=wanted)
    assert answer.json()["usage"]["prompt_tokens"] == left
    assert list(served.engine.arrived[-1].prompt_ids) == prompt[-left:]


def test_case_07_a_chat_is_shortened_too(served: Served) -> None:
    messages = [{"role": "user", "content": "a" * 5000}]
    error_of(served.chat(messages=messages), 400)
    assert served.chat(messages=messages, truncate_prompt_tokens=20, max_tokens=1).status_code == 200
    assert len(served.engine.arrived[-1].prompt_ids) == 20


@pytest.mark.parametrize("most", [0, -2, "5", 1.5, True, 2**40])
def test_case_07_lengths_that_are_none(served: Served, most: object) -> None:
    assert error_of(served.post(truncate_prompt_tokens=most), 400)["param"] == "truncate_prompt_tokens"


def test_case_07_more_than_there_is_room_for(served: Served) -> None:
    error = error_of(served.post(truncate_prompt_tokens=200, max_tokens=100), 400)
    assert "156" in error["message"]
