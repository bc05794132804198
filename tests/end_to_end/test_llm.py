"""`LLM` in this process: answers, stop strings, and bad input that harms nothing."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bulletserve import LLM, SamplingParams
from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError, ContextTooLong, EngineError, InvalidRequest
from bulletserve.scheduler.policies.time_sliced import TimeSliced
from tests.end_to_end.test_processes import CONFIG


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with LLM(str(folder / "config.json"), load_format="dummy", dtype="float32") as llm:
        yield llm


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    alone = [llm.generate([ids], GREEDY)[0].token_ids for ids in ([1, 2, 3], [4] * 40, [5, 6])]
    together = llm.generate([[1, 2, 3], [4] * 40, [5, 6]], GREEDY)
    assert [answer.token_ids for answer in together] == alone
    assert [answer.finish_reason for answer in together] == ["length"] * 3
    assert llm.generate([1, 2, 3], GREEDY)[0].token_ids == alone[0]


def test_a_stop_string_ends_an_answer(llm: LLM) -> None:
    text = llm.generate([[1, 2, 3]], GREEDY)[0].text
    stop = text[4:8]
    (answer,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop))
    assert answer.text == text[: text.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


FORMATS = (
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"json": {"enum": [7]}}}, "7"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "x"}}}}, '"x"'),
    ({"response_format": {"type": "text"}}, "(?s:.*)"),
    ({"guided_json": '{"type": "boolean"}'}, "true|false"),
    ({"guided_regex": "z{4}"}, "zzzz"),
    ({"guided_choice": ["x"]}, "x"),
    ({"guided_grammar": 'root ::= "a" | "b"'}, "a|b"),
)


def test_formats_of_answers_each_their_own(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=20, seed=3, **wanted) for wanted, _ in FORMATS]
    answers = llm.generate([[1, 2, 3]] * len(FORMATS), params)
    for answer, (wanted, regex) in zip(answers, FORMATS, strict=True):
        assert re.fullmatch(regex, answer.text), (wanted, answer.text)
    free = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, seed=3))
    assert free[0].token_ids == answers[4].token_ids, "an answer without a format is what it would be alone"


@pytest.mark.parametrize(
    "wanted",
    [
        {"response_format": "json"},
        {"structured_outputs": {"json": {"type": "nothing"}}},
        {"structured_outputs": ["a"]},
        {"guided_regex": "("},
        {"guided_regex": 3},
        {"guided_choice": ["a"], "structured_outputs": {"choice": ["a"]}},
    ],
)
def test_formats_that_cannot_be_followed_are_refused(llm: LLM, wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([[1], [2]], [SamplingParams(), SamplingParams(**wanted)])
    assert len(llm.generate([7, 8], GREEDY)[0].token_ids) == 12


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        [None],
        ["a", 1],
        5,
        [1.5],
        {"prompt": "a"},
        b"abc",
        "",
        [[]],
        [[1], []],
        "\ud800",
        [[-1]],
        [[500]],
        [[True]],
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(llm: LLM, prompts: object) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    assert len(llm.generate([7, 8], GREEDY)[0].token_ids) == 12


def test_bad_parameters_and_options_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([[1]], [None])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest):
        llm.generate([[1]], {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        llm.chat("hi")  # type: ignore[arg-type]
    with pytest.raises(ContextTooLong, match="maximum context length is 2048"):
        llm.generate([[1]], SamplingParams(max_tokens=2048))
    with pytest.raises(ConfigError, match="2 prompts"):
        llm.generate([[1], [2]], [GREEDY])
    with pytest.raises(ConfigError, match="unknown options: speed"):
        LLM(speed=9)
    with pytest.raises(ConfigError, match="either"):
        LLM(config=EngineConfig(), max_num_seqs=3)
    for options in ({"max_num_seqs": "x"}, {"block_size": 16.5}, {"policy": None}, {"seed": 2**80}, {"model": 5}):
        with pytest.raises(ConfigError):
            LLM(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="option 'name'"):
        LLM(policy="static_split:name=x")


def test_several_threads_each_get_their_own(llm: LLM) -> None:
    expected = {n: llm.generate([[n, n]], GREEDY)[0].token_ids for n in range(8)}
    found: dict[int, list[int]] = {}

    def ask(n: int) -> None:
        found[n] = llm.generate([[n, n]], GREEDY)[0].token_ids

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_a_closed_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    llm = LLM(str(tmp_path / "config.json"), load_format="dummy")
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate([[1]], GREEDY)


class Panic(BaseException):
    """As a library in Rust raises it: no `Exception`."""


def test_whatever_ends_the_loop_whoever_waits_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def panics(*_: object) -> None:
        raise Panic("at line 3")

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(TimeSliced, "decide", panics)
    told: list[str] = []

    def ask(llm: LLM) -> None:
        for _ in range(2):
            try:
                llm.generate([[1, 2, 3]], GREEDY)
            except EngineError as error:
                told.append(str(error))

    with LLM(str(tmp_path / "config.json"), load_format="dummy", dtype="float32", policy="time_sliced") as llm:
        asking = threading.Thread(target=ask, args=(llm,), daemon=True)
        asking.start()
        asking.join(20)
    assert told == ["the scheduler failed: Panic('at line 3')"] * 2


def test_rules_of_tokens_and_what_is_told_of_them(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (plain,) = llm.generate([[5, 6, 7]], params)
    assert len(plain.logprobs) == 6 and sorted(plain.prompt_logprobs) == [1, 2]
    assert [one.top_ids[0] for one in plain.logprobs] == plain.token_ids
    allowed = SamplingParams(max_tokens=6, ignore_eos=True, allowed_token_ids=(40, 41), bad_words=(chr(200),))
    (limited,) = llm.generate([[5, 6, 7]], allowed)
    assert set(limited.token_ids) <= {40, 41} and not limited.logprobs
    first = plain.token_ids[0]
    stopped = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=(first,), include_stop_str_in_output=True)
    (ended,) = llm.generate([[5, 6, 7]], stopped)
    assert ended.token_ids == [first] and ended.stop_reason == first
    with pytest.raises(InvalidRequest, match="allowed_token_ids"):
        llm.generate([[5]], SamplingParams(allowed_token_ids=(10**6,)))
