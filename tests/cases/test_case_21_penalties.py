"""Case 21: penalties that count the wrong tokens."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from bulletserve.core.token_rules import TokenRules
from tests.cases.model_server import ModelServer
from tests.kernels.plain_rules import by_rules

PROMPT = [40, 41, 40, 42, 40, 41, 40, 40]
PENALTIES: list[dict[str, float]] = [
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 3.0},
    {"presence_penalty": -1.0, "frequency_penalty": 1.5, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with ModelServer(tmp_path_factory.mktemp("model")) as running:
        yield running


def expected(
    server: ModelServer, prompt: list[int], penalties: dict[str, float], count: int
) -> tuple[str, list[float]]:
    """Greedy text by plain arithmetic over the model's own logits, and how likely each token was."""
    tokens, told = list(prompt), []
    for _ in range(count):
        row = torch.tensor(by_rules(server.logits(tokens)[-1].tolist(), TokenRules(**penalties), tokens, len(prompt)))
        tokens.append(int(row.argmax()))
        told.append(float(row.log_softmax(-1).max()))
    return server.codec.decode(tokens[len(prompt) :], skip_special_tokens=False), told


def first_step(server: ModelServer, **penalties: float) -> dict[str, float]:
    """The likeliest tokens, with one of the prompt among them."""
    body: dict[str, Any] = {"max_tokens": 1, "logprobs": 20, "ignore_eos": True, "logit_bias": {"40": 20}}
    likeliest: dict[str, float] = server.complete(PROMPT, **body, **penalties)["choices"][0]["logprobs"][
        "top_logprobs"
    ][0]
    assert server.piece(40) in likeliest
    return likeliest


def test_case_21_at_the_first_step_only_repetition_looks_at_the_prompt(server: ModelServer) -> None:
    plain = first_step(server)
    assert first_step(server, presence_penalty=2.0) == plain
    assert first_step(server, frequency_penalty=2.0) == plain
    repetition = first_step(server, repetition_penalty=1.1)
    assert repetition[str(server.piece(40))] < plain[str(server.piece(40))] - 0.1


@pytest.mark.parametrize("penalties", PENALTIES)
def test_case_21_whole_answers_by_plain_arithmetic(server: ModelServer, penalties: dict[str, float]) -> None:
    choice = server.complete(
        PROMPT, max_tokens=24, logprobs=0, ignore_eos=True, skip_special_tokens=False, **penalties
    )["choices"][0]
    text, told = expected(server, PROMPT, penalties, 24)
    assert choice["text"] == text
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(told, abs=1e-3)


def test_case_21_neighbours_are_not_penalised(server: ModelServer) -> None:
    plain = {"max_tokens": 24, "ignore_eos": True, "skip_special_tokens": False}
    mixed: list[dict[str, float]] = [{}, *PENALTIES, {}, {}]
    with ThreadPoolExecutor(len(mixed)) as pool:
        answers = list(pool.map(lambda own: server.complete(PROMPT, **plain, **own), mixed))
    for own, answer in zip(mixed, answers, strict=True):
        assert answer["choices"][0]["text"] == expected(server, PROMPT, own, 24)[0]


def test_case_21_after_a_preemption_an_answer_still_counts_as_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    with ModelServer(tmp_path_factory.mktemp("tight"), total_blocks=24) as tight:
        body: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "skip_special_tokens": False, "logprobs": 0}
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda own: tight.complete(PROMPT, **body, **own), PENALTIES))
        assert tight.state.preemptions
        for own, answer in zip(PENALTIES, answers, strict=True):
            text, told = expected(tight, PROMPT, own, 40)
            assert answer["choices"][0]["text"] == text
            assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(told, abs=1e-3)
