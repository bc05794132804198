"""Formats and rules that go wrong after an answer has begun: that request's fault, told to it and to nobody else."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bulletserve import LLM, SamplingParams
from bulletserve.core.errors import EngineError, InvalidRequest
from bulletserve.core.events import Event, StepDone
from bulletserve.core.launch import Launch
from tests.end_to_end.engine_server import END_ID, EngineServer
from tests.end_to_end.test_processes import CONFIG
from tests.server import sse

OPTIONAL = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(600)}}
FREE = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"grammar": 'start: "a" start'}}, "beyond 1 tokens: it allows too many different texts"),
    ({"structured_outputs": {"json": OPTIONAL}}, "tokens: it allows too many different texts"),
    ({"structured_outputs": {"regex": r"[^\s\S]"}}, "cannot be followed: no text fits it"),
    ({"structured_outputs": {"choice": ["yes"]}, "bad_words": ["yes"]}, "no token can come here"),
    ({"structured_outputs": {"choice": ["yes"]}, "bad_words": ["y"]}, "no token can come here"),
    ({"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [END_ID]}, "no token can come here"),
    ({"structured_outputs": {"regex": "(a|b)?"}, "min_tokens": 1, "bad_words": ["a", "b"]}, "no token can come here"),
    ({"allowed_token_ids": [70], "bad_words": ["gg"]}, "no token can come here"),
    ({"allowed_token_ids": [70], "bad_words": ["g"]}, "forbid every one of them"),
    ({"allowed_token_ids": [END_ID], "min_tokens": 3}, "forbid every one of them"),
]
INSIDES = ("limit", "row", "llguidance", "Extension", "lexer", "non-verbose", "Parser", "ff_tokens")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with EngineServer(tmp_path_factory.mktemp("small"), max_model_len=512) as served:
        yield served


def check_told(error: dict[str, Any], words: str) -> None:
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not [word for word in INSIDES if word in error["message"]]


@pytest.mark.parametrize(("wanted", "words"), BROKEN)
def test_whoever_asked_gets_a_400_and_nobody_else_notices(
    served: EngineServer, wanted: dict[str, Any], words: str
) -> None:
    alone = served.complete(prompt="free", **FREE)["text"]
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(served.complete, prompt="free", **FREE) for _ in range(3)]
        answer = served.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 60, **wanted})
        assert [other.result()["text"] for other in others] == [alone] * 3
    assert answer.status_code == 400, answer.text
    check_told(answer.json()["error"], words)


@pytest.mark.parametrize(("wanted", "words"), BROKEN)
def test_in_a_stream_it_is_an_event_once_something_was_said(
    served: EngineServer, wanted: dict[str, Any], words: str
) -> None:
    body = {"prompt": "hello", "max_tokens": 60, "stream": True, **wanted}
    with served.http.stream("POST", "/v1/completions", json=body) as answer:
        answer.read()
    if answer.status_code == 400:
        check_told(answer.json()["error"], words)
        return
    *said, last = sse.events(answer)
    assert said and not any(event["choices"][0].get("finish_reason") for event in said)
    check_told(last["error"], words)


def test_a_bias_forbids_nothing(served: EngineServer) -> None:
    biases = {str(token): -100 for token in range(300)}
    choice = served.complete(structured_outputs={"choice": ["yes", "no"]}, logit_bias=biases)
    assert (choice["text"] in ("yes", "no"), choice["finish_reason"]) == (True, "stop")


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": END_ID}))
    with LLM(str(tmp_path / "config.json"), load_format="dummy", dtype="float32") as llm:
        yield llm


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_other_prompts_of_the_same_call_have_their_answers(llm: LLM) -> None:
    alone = llm.generate([[1, 2, 3]], GREEDY)[0].token_ids
    broken = [SamplingParams(max_tokens=60, **wanted) for wanted, words in BROKEN if "every one" not in words]
    answers = llm.generate([[1, 2, 3]] * (len(broken) + 2), [GREEDY, *broken, GREEDY])
    assert [answers[0].token_ids, answers[-1].token_ids] == [alone, alone]
    assert answers[0].error is None and answers[0].finish_reason == "length"
    for answer, (_, words) in zip(answers[1:-1], BROKEN, strict=False):
        assert answer.finish_reason == "error" and answer.stop_reason is None
        assert isinstance(answer.error, InvalidRequest) and words in str(answer.error)
        assert len(answer.token_ids) < 60 and min(answer.token_ids, default=0) >= 0


def test_a_failing_step_is_told_by_the_answers_in_it(llm: LLM) -> None:
    def fail(_: Launch) -> None:
        llm._engine.executor.before_step = None  # type: ignore[union-attr]
        raise ValueError("a cosmic ray")

    llm._engine.executor.before_step = fail  # type: ignore[union-attr]
    (answer,) = llm.generate([[1, 2, 3]], GREEDY)
    assert answer.finish_reason == "error" and isinstance(answer.error, EngineError)
    assert "a cosmic ray" in str(answer.error)
    assert llm.generate([[1, 2, 3]], GREEDY)[0].error is None


def test_an_engine_that_ends_is_raised(llm: LLM) -> None:
    class Gone:
        def post(self, event: Event) -> None:
            assert isinstance(event, StepDone)
            llm._engine.inbox.post(replace(event, tokens=(), error="the device is gone", fatal=True))

    llm._engine.executor.poster = Gone()  # type: ignore[union-attr]
    with pytest.raises(EngineError, match="the device is gone"):
        llm.generate([[1, 2, 3]], GREEDY)
    with pytest.raises(EngineError, match="the device is gone"):
        llm.generate([[1, 2, 3]], GREEDY)


HALF = "a\ud800"


@pytest.mark.parametrize(
    "wanted",
    [
        {"structured_outputs": {"json": {"enum": [HALF]}}},
        {"structured_outputs": {"json": {"enum": [{1}]}}},
        {"structured_outputs": {"json": {"enum": [float("nan")]}}},
        {"structured_outputs": {"regex": HALF}},
        {"structured_outputs": {"choice": [HALF]}},
        {"structured_outputs": {"grammar": f'start: "{HALF}"'}},
        {"guided_json": {"properties": {b"a": 1}}},
        {"guided_json": f'{{"enum": ["{HALF}"]}}'},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": object()}}}},
    ],
)
def test_what_is_no_text_or_no_json_is_a_named_error(llm: LLM, wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([[1]], SamplingParams(**wanted))


@pytest.mark.parametrize(
    "wanted",
    [{"stop": [HALF]}, {"stop": HALF}, {"bad_words": [HALF]}, {"stop": 5}, {"stop_token_ids": 5}, {"logit_bias": 3}],
)
def test_and_so_are_parameters_that_cannot_be(wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        SamplingParams(**wanted)


def test_none_asks_for_nothing() -> None:
    nothing = dict.fromkeys(("stop", "bad_words", "stop_token_ids", "allowed_token_ids", "logit_bias"))
    assert SamplingParams(**nothing) == SamplingParams()  # type: ignore[arg-type]


def test_a_chat_that_is_no_text_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    template = "{{ messages[0]['content'] }}"
    path = str(tmp_path / "config.json")
    with (
        LLM(path, load_format="dummy", chat_template=template) as llm,
        pytest.raises(InvalidRequest, match="half of a surrogate pair"),
    ):
        llm.chat([{"role": "user", "content": HALF}])
