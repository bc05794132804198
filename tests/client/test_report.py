"""Figures of runs: what is scored, what counts as met, what is said."""

import math
from collections.abc import Sequence

import pytest

from bulletserve.client.outcome import Outcome
from bulletserve.client.replay import Run
from bulletserve.client.report import client_table, find_goodput, judge, latency_table, metrics, remarks
from bulletserve.core.slo import Slo
from bulletserve.telemetry.client_lag import client_lag
from bulletserve.telemetry.goodput import Estimate
from bulletserve.telemetry.latency import Answer

SLO = Slo("x", 0.3, 0.02)
LAG = client_lag(5.0, [0.0, 1.0], [0.001, 1.002], [0.0, 0.001], 0.1)


def outcome(number: int, ttft_s: float = 0.1, kind: str = "ok", tokens: int = 3) -> Outcome:
    due_s = 100.0 + number
    made = Outcome(
        number, 3, Answer(due_s, 5, [due_s + ttft_s + 0.01 * n for n in range(tokens)], finish="length"), due_s
    )
    made.ended_s = due_s + ttft_s + 0.01 * tokens
    made.counted_by = "events, usage"
    if kind != "ok":
        made.fail(kind, f"the message of {kind}")
    return made


def run(outcomes: Sequence[Outcome], rate: float = 5.0, left_out: int = 0) -> Run:
    return Run(rate, 100.0, outcomes, LAG, left_out)


def test_failures_meet_nothing_however_fast_their_tokens_came() -> None:
    outcomes = [outcome(0), outcome(1, kind="cut"), outcome(2, ttft_s=0.5), outcome(3, kind="http_429", tokens=0)]
    result = judge(run(outcomes), SLO, 4)
    assert result.attainment == 0.25
    assert result.kinds == {"ok": 2, "cut": 1, "http_429": 1}
    assert result.requests_per_s == pytest.approx(2 / 2.52)
    assert result.summary.tokens_per_s == pytest.approx(9 / 2.52), "of all answers, from the first arrival"


def test_the_middle_of_600_is_scored() -> None:
    outcomes = [outcome(n, ttft_s=0.1 if 100 <= n < 500 else 9.0) for n in range(600)]
    result = judge(run(outcomes), SLO, 600)
    assert len(result.scored) == 400 and result.attainment == 1.0
    assert result.summary.ttft_p99_s == pytest.approx(0.1)


def test_what_an_interruption_ended_is_not_scored() -> None:
    result = judge(run([outcome(0), outcome(1, kind="interrupted")], left_out=3), SLO, 5)
    assert result.attainment == 1.0 and len(result.scored) == 1
    nothing = judge(run([], left_out=5), SLO, 5)
    assert math.isnan(nothing.attainment)
    assert any("3 of 5" in text for text in remarks([result], 0.01))


@pytest.mark.parametrize("sent", [0, 1])
def test_what_is_not_known_is_a_dash(sent: int) -> None:
    lag = client_lag(math.inf, [0.0] * sent, [0.0] * sent, [], math.nan)
    result = judge(Run(math.inf, 100.0, [outcome(0)] * sent, lag, 1 - sent), SLO, 1)
    for table in (latency_table([result]), client_table([result])):
        shown = [str(cell) for column in table.columns[1:] for cell in column.cells]
        assert "-" in shown or sent, shown
        assert not any("nan" in cell or "inf" in cell for cell in shown), shown


def at(rate: float, late: int) -> Run:
    """240 requests of which `late` of the 160 scored miss."""
    return run([outcome(n, ttft_s=9.0 if 40 <= n < 40 + late else 0.1) for n in range(240)], rate)


def test_goodput_is_that_of_the_definitions_or_why_there_is_none() -> None:
    good, bad = judge(at(10.0, 12), SLO, 240), judge(at(10.4, 20), SLO, 240)
    found = find_goodput([bad, good])
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx(10.0 + 0.4 * (0.925 - 0.9) / (0.925 - 0.875))
    assert metrics("w", [good, bad], found)["goodput_w_req_s"] == found.value
    for results, why in (
        ([good], "two rates"),
        ([good, judge(at(12.0, 20), SLO, 240)], "5 % apart"),
        ([good, judge(at(10.4, 12), SLO, 240)], "10.4 req/s or more"),
        ([bad, judge(at(10.6, 40), SLO, 240)], "below 10.4"),
        ([judge(run([outcome(0)], 1.0), SLO, 1), judge(run([outcome(0)], 2.0), SLO, 1)], "600 requests"),
    ):
        said = find_goodput(results)
        assert isinstance(said, str) and why in said


def test_metrics_are_flat_and_end_in_their_unit() -> None:
    result = judge(run([outcome(0), outcome(1, kind="http_500", tokens=0)], 2.5), SLO, 2)
    found = metrics("my list", [result], "none")
    assert found["my_list_at_2_5_met_x"] == 0.5
    assert found["my_list_at_2_5_ttft_p50_ms"] == pytest.approx(100)
    assert found["my_list_at_2_5_http_500_n"] == 1 and found["my_list_at_2_5_whole_answers_n"] == 1
    assert found["my_list_at_2_5_client_late_max_ms"] == pytest.approx(2)
    assert all(key.rpartition("_")[2] in ("x", "ms", "s", "n") for key in found)


def test_what_has_to_be_said_is_said() -> None:
    short = outcome(1, tokens=2)
    slow = Run(5.0, 100.0, [outcome(0), short, outcome(2, kind="cut")],
               client_lag(5.0, [0.0, 1.0], [0.5, 1.5], [0.2], 0.99))  # fmt: skip
    said = "\n".join(remarks([judge(slow, SLO, 3)], 0.01))
    assert "1 x cut, such as: the message of cut" in said
    assert "1 whole answers were not as long" in said
    assert "DID NOT KEEP UP" in said and "99% of a core" in said
    assert "events, usage (3 answers)" in said
    assert "KEEP UP" not in "\n".join(remarks([judge(slow, SLO, 3)], 10.0))


def test_a_line_tells_of_one_request() -> None:
    line = outcome(4).line(100.0, SLO, 5.0)
    assert line["due_s"] == 4.0 and line["ttft_s"] == pytest.approx(0.1) and line["met"] is True
    assert line["token_times_s"] == [4.1, 4.11, 4.12] and line["longest_gap_s"] == pytest.approx(0.01)
    failed = outcome(1, kind="connect", tokens=0).line(100.0, SLO, float("inf"))
    assert (failed["kind"], failed["met"], failed["ttft_s"], failed["rate"]) == ("connect", False, None, "inf")
