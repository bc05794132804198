"""Sampling parameters are checked once, by name; everything else about a request is then known to be right."""

from typing import Any

import pytest

from bulletserve.core.errors import InvalidRequest
from bulletserve.core.request import SamplingParams
from bulletserve.core.resolve import ModelLimits, resolve_request
from bulletserve.core.slo import NO_DEADLINE_S, Slo
from bulletserve.core.token_rules import TokenRules


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 2.5},
        {"top_p": 1},
        {"top_k": -1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": None},
        {"stop": "\n"},
        {"stop": ["a", "b"]},
        {"stop_token_ids": [0, 5]},
        {"ignore_eos": True},
    ],
)
def test_these_are_fine(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert isinstance(params.stop, tuple)
    assert isinstance(params.stop_token_ids, tuple)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", None),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", 2**31),
        ("seed", 2**63),
        ("seed", 1.5),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", ["a"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", 1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_tokens", True),
        ("min_p", 1.1),
        ("min_p", None),
        ("presence_penalty", 2.01),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("logit_bias", {5: 101}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", [5]),
        ("logit_bias", dict.fromkeys(range(1025), 1)),
        ("allowed_token_ids", [1] * 8193),
        ("bad_words", [""]),
        ("bad_words", ["x" * 1001]),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", 1.0),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.status == 400


LIMITS = ModelLimits(64, 100, frozenset({9}))


def resolved(**fields: Any) -> TokenRules | None:
    return resolve_request(1, [1, 2], SamplingParams(**fields), LIMITS, 0.0).rules


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5, "top_k": 3, "seed": 4, "stop": "x", "stop_token_ids": [5], "ignore_eos": True},
        {"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0, "logit_bias": {5: 0}},
        {"min_tokens": 9, "ignore_eos": True},  # nothing can end it before
        {"include_stop_str_in_output": True},
    ],
)
def test_who_asks_for_nothing_has_no_rules(fields: dict[str, Any]) -> None:
    assert resolved(**fields) is None


def test_rules_are_resolved() -> None:
    rules = resolved(min_tokens=3, stop_token_ids=[7], logit_bias={5: 1}, allowed_token_ids=[4, 4, 5], logprobs=0)
    assert rules == TokenRules(min_tokens=3, end_ids=(7, 9), bias=((5, 1.0),), allowed_ids=(4, 5), logprobs=0)
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        for wrong in (-1, 100):
            with pytest.raises(InvalidRequest, match=name):
                resolved(**{name: {wrong: 1} if name == "logit_bias" else [5, wrong]})
    with pytest.raises(InvalidRequest, match="min_tokens"):
        resolved(min_tokens=63, max_tokens=None)


@pytest.mark.parametrize("seed", [0, 7, -(2**63), 2**63 - 1])
def test_copies_have_seeds_of_their_own(seed: int) -> None:
    params = SamplingParams(seed=seed)
    copies = [params.copy(number).seed for number in range(128)]
    assert copies[0] == seed and len(set(copies)) == 128
    assert SamplingParams().copy(3).seed is None


def test_a_deadline_is_counted_from_the_arrival() -> None:
    assert Slo("chat", 0.3).ttft_deadline_s(10.0, 100) == pytest.approx(10.3)
    assert Slo("chat", 0.3, None, 0.002).ttft_deadline_s(10.0, 100) == pytest.approx(10.5)
    assert Slo().ttft_deadline_s(10.0, 100) == NO_DEADLINE_S
