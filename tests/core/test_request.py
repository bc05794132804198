"""Sampling parameters are checked once, by name; everything else about a request is then known to be right."""

from typing import Any

import pytest

from bulletserve.core.errors import InvalidRequest
from bulletserve.core.request import SamplingParams
from bulletserve.core.slo import NO_DEADLINE_S, Slo


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
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.status == 400


def test_a_deadline_is_counted_from_the_arrival() -> None:
    assert Slo("chat", 0.3).ttft_deadline_s(10.0, 100) == pytest.approx(10.3)
    assert Slo("chat", 0.3, None, 0.002).ttft_deadline_s(10.0, 100) == pytest.approx(10.5)
    assert Slo().ttft_deadline_s(10.0, 100) == NO_DEADLINE_S
