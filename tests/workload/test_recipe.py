"""Request lists are made the same way everywhere, and the built-in ones are like the published traces."""

from itertools import pairwise
from pathlib import Path

import pytest

from bulletserve.core.errors import ConfigError
from bulletserve.telemetry.latency import quantile
from bulletserve.workload.named import BUILT_IN, open_workload
from bulletserve.workload.recipe import QUANTILES, long_context, read_trace, sample, synthetic
from bulletserve.workload.request_list import RequestLengths, read_request_list, with_new_gaps

SHARED = Path(__file__).parents[3] / "shared"
TRACES = {
    "azure-code": "azure_code_2023.csv",
    "azure-conv": "azure_conv_2023.csv",
    "arxiv-sum": "arxiv_summarization.csv",
}

with_files = pytest.mark.skipif(not (SHARED / "workloads").is_dir(), reason="the published traces are not here")


@with_files
@pytest.mark.parametrize("name", TRACES)
def test_the_lists_are_made_again_from_the_published_traces(name: str) -> None:
    made = sample(read_trace(SHARED / "traces" / TRACES[name]))
    assert made == read_request_list(SHARED / "workloads" / f"{name}.jsonl")


@with_files
def test_the_synthetic_list_is_made_again() -> None:
    assert long_context() == read_request_list(SHARED / "workloads" / "long-context.jsonl")


def test_a_trace_is_read_row_by_row_and_long_rows_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,100,20\nnow,1,1\nnow,16000,1\nnow,15990,10\n")
    assert read_trace(path) == ((100, 20), (4, 2), (15990, 10))
    (one, two) = sample(read_trace(path), count=2)
    assert {(r.prompt_tokens, r.output_tokens) for r in (one, two)} <= {(100, 20), (4, 2), (15990, 10)}
    assert open_workload(str(path)).requests == sample(read_trace(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "has the columns"),
        ("", "has the columns"),
        ("ContextTokens,GeneratedTokens\n1,2\nmany,2\n", "line 3"),
        ("ContextTokens,GeneratedTokens\n5\n", "line 2"),
        ("ContextTokens,GeneratedTokens\n", "no row"),
        ("ContextTokens,GeneratedTokens\n20000,2\n", "no row"),
    ],
)
def test_a_broken_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize("name", QUANTILES)
def test_built_in_lists_follow_the_quantiles(name: str) -> None:
    made = synthetic(name, count=4000)
    prompts, outputs = QUANTILES[name]
    for lengths, quantiles in (
        ([r.prompt_tokens for r in made], prompts),
        ([r.output_tokens for r in made], outputs),
    ):
        assert quantiles[0] <= min(lengths) and max(lengths) <= quantiles[-1]
        for share, at in ((0.25, 4), (0.5, 5), (0.75, 6), (0.9, 7)):
            assert quantiles[at - 1] <= quantile(lengths, share) <= quantiles[at + 1]
            assert quantile(lengths, share) == pytest.approx(quantiles[at], rel=0.25)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_workload_has_600_requests_at_one_a_second(name: str) -> None:
    workload = open_workload(name)
    assert workload.name == name and workload.origin
    assert len(workload.requests) == 600
    assert all(a.arrival_s < b.arrival_s for a, b in pairwise(workload.requests))
    assert workload.requests[-1].arrival_s == pytest.approx(600, rel=0.15)
    assert open_workload(name) == workload


def test_what_is_no_workload_is_told_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="azure-code, azure-conv, arxiv-sum, long-context"):
        open_workload("azure")
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        open_workload(str(tmp_path / "none.jsonl"))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ConfigError, match="holds no requests"):
        open_workload(str(empty))


def test_new_gaps_keep_lengths_and_depend_on_the_seed_alone() -> None:
    requests = (RequestLengths(0.0, 10, 2), RequestLengths(0.5, 20, 3), RequestLengths(9.0, 30, 4))
    again = with_new_gaps(requests, 1)
    assert [(r.prompt_tokens, r.output_tokens) for r in again] == [(10, 2), (20, 3), (30, 4)]
    assert again == with_new_gaps(requests[:2], 1) + again[2:]
    assert again != with_new_gaps(requests, 2)
