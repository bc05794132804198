"""The figures of a hand-made run, and that what is kept judges as the run itself did."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulletserve.commands.compare_tables import left_out
from bulletserve.comparison.arm_run import ArmRun
from bulletserve.comparison.measured import Measured, Scored, measured
from bulletserve.comparison.outcome import (
    goodput_of,
    goodput_ratio,
    incomplete_rounds,
    medians,
    paired_ratios,
    same_answers,
)
from bulletserve.core.plan import Lane
from bulletserve.core.request import FinishReason
from bulletserve.core.slo import Slo
from bulletserve.telemetry.goodput import Estimate
from bulletserve.telemetry.latency import Answer
from bulletserve.telemetry.timeline import StepSpan


def span(kind: str, sms: int, began_s: float, ended_s: float) -> StepSpan:
    lanes = {"prefill": (Lane.PREFILL,), "decode": (Lane.DECODE,), "mixed": (Lane.PREFILL, Lane.DECODE)}[kind]
    return StepSpan(kind, lanes, sms, began_s, ended_s, 0, 0, "")


ANSWERS = (
    Answer(10.0, 100, [10.5, 10.6, 10.8], [1, 2, 3], FinishReason.LENGTH),
    Answer(11.0, 50, [11.1], [4], FinishReason.LENGTH),
    Answer(11.5, 70, [], [], FinishReason.REFUSED),
    Answer(12.0, 60, [12.9, 13.9], [5, 6], ""),
)
SPANS = (
    span("prefill", 100, 10.0, 11.0),
    span("decode", 32, 10.5, 11.5),
    span("mixed", 132, 11.5, 12.5),
    span("decode", 48, 13.0, 14.0),
    span("decode", 48, 14.0, 20.0),
)
RUN = ArmRun("bullet", ANSWERS, 10.0, 14.0, SPANS, 0.5, 3, {"decode": 0.25}, 600.0, 1500.0)


def test_figures_of_a_hand_made_run() -> None:
    found = measured(RUN, 2.0, 0, range(3))
    figures = found.figures
    assert figures["ttft_p50_ms"] == pytest.approx(300.0) and figures["longest_gap_ms"] == pytest.approx(200.0)
    assert figures["tpot_p50_ms"] == pytest.approx(150.0)
    tokens_per_s = 6 / 3.9
    assert figures["tok_s"] == pytest.approx(tokens_per_s), "all answers, to the last token"
    assert figures["req_s"] == pytest.approx(2 / 1.1), "those that have ended"
    assert figures["both_lanes_x"] == pytest.approx(0.5 / 4)
    assert figures["mixed_steps_x"] == pytest.approx(1 / 4), "the last step ended after the window"
    assert figures["switches_per_s"] == pytest.approx(2 / 4), "100 to 132 on one lane, 32 to 48 on the other"
    assert figures["joules_per_token_j"] == pytest.approx(600 / tokens_per_s)
    assert (figures["preemptions_n"], figures["refused_n"], figures["window_s"]) == (3, 1, 4)
    assert figures["forecast_error_decode_x"] == 0.25 and figures["clock_mhz"] == 1500
    shares = {"100+0": 0.125, "100+32": 0.125, "0+32": 0.125, "mixed 132": 0.25, "idle": 0.125, "0+48": 0.25}
    assert found.partitions == pytest.approx(shares)
    assert found.met(Slo("", 0.3, 0.2)).tolist() == [False, True, False]
    assert found.met(Slo("", 0.6, 0.2)).tolist() == [True, True, False]
    assert found.met(Slo("", 0.6, 0.1)).tolist() == [False, True, False]


def test_what_is_unknown_is_left_out() -> None:
    found = measured(replace(RUN, watts=float("nan"), mhz=float("nan"), forecast_errors={}), 2.0, 0, range(3))
    assert not {"joules_per_token_j", "power_w", "clock_mhz", "forecast_error_decode_x"} & set(found.figures)
    document = found.to_json() | {"metrics": found.figures}
    assert Measured.from_json(document) == found


times = st.lists(st.floats(0.001, 5.0), max_size=5).map(
    lambda gaps: [10.0 + sum(gaps[: at + 1]) for at in range(len(gaps))]
)
answers = st.builds(
    Answer,
    st.just(10.0),
    st.integers(1, 5000),
    times,
    st.just([]),
    st.sampled_from([*FinishReason, ""]),
)


@given(answer=answers, ttft_s=st.floats(0.01, 20.0), tpot_s=st.none() | st.floats(0.001, 5.0))
def test_what_is_kept_is_judged_as_the_answer(answer: Answer, ttft_s: float, tpot_s: float | None) -> None:
    """But for an answer that has not ended, which no scored request is; up to the microsecond that is kept."""
    (kept,) = measured(replace(RUN, answers=[answer]), 1.0, 0, range(1)).scored
    assert Scored.from_line(kept.line()) == kept
    near = [abs(answer.ttft_s - ttft_s), abs((answer.tpot_s or 0.0) - (tpot_s or inf))]
    if min(near) > 2e-6 and answer.finish:
        assert kept.meets(Slo("", ttft_s, tpot_s)) == answer.meets(Slo("", ttft_s, tpot_s))


def made(policy: str, rate: float, share: float, tok_s: float = 100.0, number: int = 0, count: int = 160) -> Measured:
    lines = [
        Scored(10, 2, 0.1 if at < share * count else 9.0, 0.01, "length", f"{at % (3 if policy == 'a' else 4)}")
        for at in range(count)
    ]
    return Measured(policy, rate, number, {"tok_s": tok_s, "ttft_p50_ms": 50.0}, {}, tuple(lines))


SLO = Slo("tight", 0.2, 0.02)


def test_rounds_are_paired() -> None:
    ours = [made("a", 1.0, 1.0, 110.0), made("a", 1.0, 1.0, 300.0, 1), made("a", 1.0, 1.0, 130.0, 2)]
    theirs = [made("b", 1.0, 1.0, 100.0), made("b", 1.0, 1.0, 200.0, 1), made("b", 1.0, 1.0, 100.0, 2)]
    assert medians(ours)["tok_s"] == 130.0
    assert paired_ratios(ours, theirs) == {"tok_s": pytest.approx(1.3), "ttft_p50_ms": 1.0}
    assert same_answers(ours, ours) == 1.0
    assert same_answers(ours, theirs) == sum(at % 3 == at % 4 for at in range(160)) / 160


def test_goodput_is_that_of_the_definition_and_its_ratio_is_paired() -> None:
    ours = [made("a", 10.0, 0.95), made("a", 10.4, 0.85)]
    theirs = [made("b", 8.0, 0.95), made("b", 8.32, 0.85)]
    found = goodput_of(ours, SLO, 240)
    assert isinstance(found, Estimate) and found.value == pytest.approx(10.2) and found.low < 10.2 < found.high
    against = goodput_ratio(ours, theirs, SLO)
    assert against is not None and against.value == pytest.approx(10.2 / 8.16)
    assert against.high - against.low < 0.02, "the same requests are drawn for both, whose curves are alike"
    assert goodput_ratio([*ours, made("a", 10.0, 0.9, number=1)], theirs, SLO) == against, "half a round counts nothing"
    later = [made("b", one.rate, 0.9, number=1) for one in theirs]
    assert goodput_ratio(ours, later, SLO) is None, "no round that both have"


def test_rounds_are_paired_by_their_numbers() -> None:
    ours = [made("a", rate, share, number=number) for number in (0, 1) for rate, share in ((10.0, 0.95), (10.4, 0.85))]
    theirs = [made("b", rate, share, number=number) for number in (1, 2) for rate, share in ((8.0, 0.95), (8.32, 0.85))]
    assert goodput_ratio(ours, theirs, SLO) == goodput_ratio(ours[2:], theirs[:2], SLO)


def test_every_round_has_its_own_crossing() -> None:
    first = [made("a", 10.0, 0.95), made("a", 10.4, 0.85)]
    low = [made("a", 10.0, 0.8, number=1), made("a", 10.4, 0.7, number=1)]
    high = [made("a", 10.0, 1.0, number=1), made("a", 10.4, 0.95, number=1)]
    for second, why in ((low, "round 2: goodput is below 10 req/s"), (high, "round 2: goodput is 10.4 req/s or more")):
        found = goodput_of([*first, *second], SLO, 240)
        assert isinstance(found, str) and found.startswith(why)
    assert "run lower rates" in str(goodput_of(low, SLO, 240)) and "run higher rates" in str(goodput_of(high, SLO, 240))


def test_a_round_that_lacks_a_rate_is_left_out() -> None:
    first = [made("a", 10.0, 0.95), made("a", 10.4, 0.85)]
    half = [*first, made("a", 10.0, 0.8, number=1)]
    assert goodput_of(half, SLO, 240) == goodput_of(first, SLO, 240)
    assert incomplete_rounds(half) == {1: [10.4]} and incomplete_rounds(first) == {}
    assert left_out({"a": half}) == ["a: round 2 is left out of goodput, it has no run at 10.4 req/s"]


@pytest.mark.parametrize(
    ("runs", "requests", "why"),
    [
        ([made("a", 10.0, 0.95)], 240, "needs whole runs at two rates"),
        ([made("a", 10.0, 0.95), made("a", 12.0, 0.8)], 240, "lies between 10 and 12"),
        ([made("a", 10.0, 0.95), made("a", 10.4, 0.94)], 240, "is 10.4 req/s or more"),
        ([made("a", 10.0, 0.8), made("a", 10.4, 0.7)], 240, "is below 10 req/s"),
        ([made("a", 10.0, 0.95), made("a", 10.4, 0.8)], 100, "defined over 600 requests"),
    ],
)
def test_what_rates_do_not_tell_is_said(runs: list[Measured], requests: int, why: str) -> None:
    found = goodput_of(runs, SLO, requests)
    assert isinstance(found, str) and why in found
