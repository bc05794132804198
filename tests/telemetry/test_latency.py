"""Every latency figure, computed by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.events import Output
from bulletserve.core.plan import Lane
from bulletserve.core.request import Finished, FinishReason, Request
from bulletserve.core.slo import Slo
from bulletserve.telemetry.collector import Collector
from bulletserve.telemetry.lanes import GAP_WINDOW_S, LaneTimes
from bulletserve.telemetry.latency import Answer, quantile, requests_per_s, summarise

ANSWER = Answer(10.0, 5, [10.5, 10.75, 11.75, 12.0])
SINGLE = Answer(11.0, 5, [13.0])
NONE = Answer(9.0, 5)


def test_one_answer() -> None:
    assert ANSWER.ttft_s == 0.5
    assert ANSWER.tpot_s == 0.5
    assert ANSWER.gaps_s == [0.25, 1.0, 0.25]


def test_an_answer_of_one_token_has_no_tpot_and_no_gap() -> None:
    assert SINGLE.ttft_s == 2.0
    assert SINGLE.tpot_s is None
    assert SINGLE.gaps_s == []


def test_an_answer_without_tokens() -> None:
    assert NONE.ttft_s == math.inf
    assert NONE.tpot_s is None
    assert not NONE.meets(Slo())


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(), True),
        (Slo("a", 0.5, 0.5), True),
        (Slo("a", 0.49, 0.5), False),
        (Slo("a", 0.5, 0.49), False),
        (Slo("a", None, 0.49), False),
        (Slo("a", 0.49, None), False),
    ],
)
def test_meeting_targets(slo: Slo, met: bool) -> None:
    assert ANSWER.meets(slo) is met


def test_a_single_token_meets_every_tpot() -> None:
    assert SINGLE.meets(Slo("a", 2.0, 0.001))
    assert not SINGLE.meets(Slo("a", 1.9, 0.001))


def test_a_run() -> None:
    summary = summarise([ANSWER, SINGLE, NONE])
    assert (summary.requests, summary.output_tokens) == (3, 5)
    assert (summary.ttft_p50_s, summary.ttft_p90_s) == (1.25, pytest.approx(1.85))
    assert (summary.tpot_p50_s, summary.tpot_p90_s) == (0.5, 0.5)
    assert summary.longest_gap_s == 1.0
    assert summary.itl_p99_s == pytest.approx(0.985)
    assert summary.tokens_per_s == pytest.approx(5 / (13.0 - 9.0))
    assert (summary.ttft_p99_s, summary.tpot_p99_s) == (pytest.approx(1.985), 0.5)
    assert (summary.itl_p50_s, summary.whole_p50_s, summary.whole_p99_s) == (0.25, 2.0, 2.0)
    assert requests_per_s([ANSWER, SINGLE, NONE]) == pytest.approx(2 / (13.0 - 9.0))


@pytest.mark.parametrize("finish", [FinishReason.ERROR, FinishReason.REFUSED, FinishReason.ABORT])
def test_an_answer_that_ended_badly_meets_nothing_and_is_no_request_served(finish: str) -> None:
    broken = replace(ANSWER, finish=finish)
    assert not broken.meets(Slo()) and broken.ttft_s == ANSWER.ttft_s
    assert requests_per_s([broken, SINGLE]) == pytest.approx(1 / 3.0)
    assert summarise([broken]).output_tokens == 4, "its tokens came all the same"
    assert replace(ANSWER, finish=FinishReason.LENGTH).meets(Slo())


@pytest.mark.parametrize("answers", [[], [NONE]])
def test_a_run_without_tokens_has_no_figures(answers: list[Answer]) -> None:
    summary = summarise(answers)
    assert (summary.requests, summary.output_tokens) == (len(answers), 0)
    assert math.isnan(summary.ttft_p50_s)
    assert math.isnan(summary.longest_gap_s)
    assert math.isnan(summary.tokens_per_s) and math.isnan(requests_per_s(answers))


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), q=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_quantiles_are_numpys(values: list[float], q: float) -> None:
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), abs=1e-6)


def test_the_quantile_of_nothing_is_not_a_number() -> None:
    assert math.isnan(quantile([], 0.5))


def test_a_collector_keeps_what_it_is_told() -> None:
    collector = Collector()
    for request_id in (1, 2):
        collector.expect(Request(request_id, (1, 2, 3), 9, float(request_id)))
    collector.emit(Output(3.0, (1, 2), (7, 8), ((1, 0), (2, 2)), ()))
    ends = (Finished(1, FinishReason.LENGTH), Finished(2, FinishReason.ERROR, message="boom"))
    collector.emit(Output(4.0, (1,), (9,), (), ends))
    assert collector.answers[1] == Answer(1.0, 3, [3.0, 4.0], [7, 9], FinishReason.LENGTH, 0)
    assert collector.answers[2] == Answer(2.0, 3, [3.0], [8], FinishReason.ERROR, 2)
    assert collector.messages == {2: "boom"}
    assert collector.open == 0


def test_time_with_both_lanes_busy_is_counted_once_per_pair() -> None:
    """Decode runs 0 to 2 and 2 to 5, prefill 1 to 4: three seconds."""
    lanes = LaneTimes()
    lanes.observe(Lane.DECODE, 0.0, 2.0, True)
    lanes.observe(Lane.PREFILL, 1.0, 4.0, False)
    lanes.observe(Lane.DECODE, 2.0, 5.0, True)
    assert lanes.both_busy_s == pytest.approx(3.0)
    assert lanes.busy_s == {Lane.DECODE: 5.0, Lane.PREFILL: 3.0}


spans = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=12)


@given(prefills=spans, decodes=spans)
@settings(max_examples=200, deadline=None)
def test_overlap_equals_overlap_counted_second_by_second(
    prefills: list[tuple[int, int]], decodes: list[tuple[int, int]]
) -> None:
    busy: dict[Lane, set[int]] = {lane: set() for lane in Lane}
    steps = []
    for lane, lengths in ((Lane.PREFILL, prefills), (Lane.DECODE, decodes)):
        now = 0
        for pause, length in lengths:
            now += pause
            steps.append((now + length, now, lane))
            busy[lane] |= set(range(now, now + length))
            now += length
    lanes = LaneTimes()
    for finished, started, lane in sorted(steps):
        lanes.observe(lane, float(started), float(finished), lane is Lane.DECODE)
    assert lanes.both_busy_s == len(busy[Lane.PREFILL] & busy[Lane.DECODE])


def test_a_gap_is_between_steps_with_rows_while_rows_stay() -> None:
    lanes = LaneTimes()
    lanes.observe(Lane.DECODE, 0.0, 1.0, True)
    lanes.observe(Lane.PREFILL, 1.0, 4.0, False)
    lanes.observe(Lane.DECODE, 4.0, 5.0, True)
    assert lanes.longest_gap_s(5.0) == 4.0
    lanes.pause()
    lanes.observe(Lane.DECODE, 50.0, 51.0, True)
    assert lanes.longest_gap_s(51.0) == 4.0
    lanes.observe(Lane.DECODE, 51.0, 53.0, True)
    assert lanes.longest_gap_s(53.0) == 4.0
    assert lanes.longest_gap_s(5.0 + GAP_WINDOW_S) == 4.0
    assert lanes.longest_gap_s(5.1 + GAP_WINDOW_S) == 2.0, "the older one is out of the window"
    assert lanes.longest_gap_s(54.0 + GAP_WINDOW_S) == 0.0
