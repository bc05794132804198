"""Request lists: the same for the same seed, readable from a file, scaled by a rate."""

from pathlib import Path

import pytest

from bulletserve.core.errors import ConfigError
from bulletserve.telemetry.latency import quantile
from bulletserve.workload.request_list import RequestLengths, at_rate, lognormal_requests, read_request_list


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text(
        '{"arrival": 0.0, "prompt_tokens": 10, "output_tokens": 2}\n'
        '{"arrival": 1.5, "prompt_tokens": 20, "output_tokens": 3, "more": true}\n'
    )
    assert read_request_list(path) == (RequestLengths(0.0, 10, 2), RequestLengths(1.5, 20, 3))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[1, 2, 3]",
        "null",
        '{"arrival": 0.0, "prompt_tokens": 10}',
        '{"arrival": "soon", "prompt_tokens": 10, "output_tokens": 2}',
        '{"arrival": null, "prompt_tokens": 10, "output_tokens": 2}',
        '{"arrival": 0.0, "prompt_tokens": 0, "output_tokens": 2}',
        '{"arrival": 0.0, "prompt_tokens": 10, "output_tokens": 0}',
        '{"arrival": 0.0, "prompt_tokens": 1.5, "output_tokens": 2}',
        '{"arrival": 0.0, "prompt_tokens": 1e999, "output_tokens": 2}',
        '{"arrival": 0.0, "prompt_tokens": 99999999999999, "output_tokens": 2}',
        '{"arrival": %s, "prompt_tokens": 10, "output_tokens": 2}' % ("9" * 400),
        "[" * 100_000,
        '{"arrival": -1.0, "prompt_tokens": 10, "output_tokens": 2}',
        '{"arrival": NaN, "prompt_tokens": 10, "output_tokens": 2}',
        '{"arrival": Infinity, "prompt_tokens": 10, "output_tokens": 2}',
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "list.jsonl"
    good = '{"arrival": 0.0, "prompt_tokens": 10, "output_tokens": 2}'
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ConfigError, match=r"list\.jsonl, line 2"):
        read_request_list(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        read_request_list(tmp_path / "none.jsonl")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"list\.jsonl"):
        read_request_list(path)


def test_a_seed_makes_one_list() -> None:
    assert lognormal_requests(50, seed=1) == lognormal_requests(50, seed=1)
    assert lognormal_requests(50, seed=1) != lognormal_requests(50, seed=2)
    assert lognormal_requests(20, seed=1) == lognormal_requests(50, seed=1)[:20]


def test_lengths_and_arrivals_are_as_described() -> None:
    requests = lognormal_requests(4000, seed=5)
    assert requests[0].arrival_s == 0.0
    assert requests[-1].arrival_s == pytest.approx(4000, rel=0.05)
    assert quantile([r.prompt_tokens for r in requests], 0.5) == pytest.approx(800, rel=0.05)
    assert quantile([r.output_tokens for r in requests], 0.5) == pytest.approx(120, rel=0.05)
    assert all(4 <= r.prompt_tokens <= 16000 and 2 <= r.output_tokens <= 2000 for r in requests)
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)


def test_a_rate_divides_arrivals_and_changes_nothing_else() -> None:
    requests = lognormal_requests(10, seed=1)
    fast = at_rate(requests, 4.0)
    assert [r.arrival_s for r in fast] == [r.arrival_s / 4 for r in requests]
    assert [(r.prompt_tokens, r.output_tokens) for r in fast] == [(r.prompt_tokens, r.output_tokens) for r in requests]
