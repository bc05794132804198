"""A search ends beside the edge, in few runs, and runs nothing twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve import simulation
from bulletserve.core.slo import Slo
from bulletserve.simulation import find_goodput
from bulletserve.simulator.experiment import run_arm
from bulletserve.simulator.goodput_search import LOWEST_RATE, place_of, rate_at, search
from bulletserve.simulator.reach import could_meet
from bulletserve.telemetry.goodput import Met, goodput
from bulletserve.workload.named import Workload
from bulletserve.workload.request_list import RequestLengths
from tests.simulator.devices import h200


@given(edge=st.floats(0.02, 5000.0), first=st.floats(0.05, 4000.0))
@settings(max_examples=200, deadline=None)
def test_a_search_ends_beside_the_edge(edge: float, first: float) -> None:
    runs: list[int] = []

    def run(place: int) -> Met:
        runs.append(place)
        return np.full(400, rate_at(place) <= edge)

    found = search(run, place_of(first))
    assert len(runs) == len(set(runs)) == len(found) <= 26
    if edge < LOWEST_RATE / 1.03:
        assert goodput(found) == 0.0
    elif edge > 2000:
        assert goodput(found) > 1900
    elif edge > LOWEST_RATE * 1.03:
        assert goodput(found) == pytest.approx(edge, rel=0.021)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.89])
def test_where_no_rate_helps_the_lowest_is_tried_at_once(share: float) -> None:
    runs: list[int] = []

    def run(place: int) -> Met:
        runs.append(place)
        return np.arange(400) < 400 * share

    found = search(run, place_of(30.0))
    assert goodput(found) == 0.0 and min(found) == rate_at(place_of(LOWEST_RATE)) and len(runs) == 3


def long_and_short(count: int, output_tokens: int = 5) -> list[RequestLengths]:
    return [RequestLengths(float(at), (100, 9000)[at % 2], output_tokens) for at in range(count)]


def test_what_is_out_of_reach_alone_is_missed_by_every_policy() -> None:
    """The bound against the real scheduler with one request at a time, at targets on either side of what it takes."""
    setup = h200()
    truth, requests = setup.truth(3), long_and_short(4)
    for policy in ("time_sliced", "chunked_prefill:budget=8192", "static_split:decode_fraction=0.1", "bullet"):
        answers = run_arm(setup, policy, requests, 0.01, 3, None, truth).collector.answers
        for number, one in enumerate(requests):
            answer = answers[number]
            assert answer.tpot_s is not None
            for factor in (0.02, 0.3, 1.0, 3.0):
                for slo in (Slo("x", answer.ttft_s * factor), Slo("x", None, answer.tpot_s * factor)):
                    (within,) = could_meet(truth, setup.limits, [one], slo)
                    assert within or not answer.meets(slo)
                    assert within or factor < 1
                    assert not within or factor > 0.1, "it says something"
    assert could_meet(truth, setup.limits, long_and_short(2, output_tokens=1), Slo("x", None, 1e-9)) == [True, True]


def test_a_goodput_that_nothing_can_have_needs_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = h200()
    workload = Workload("list", long_and_short(240), "made up")

    def run(*_: object) -> None:
        raise AssertionError("it was run")

    monkeypatch.setattr(simulation, "scored_answers", run)
    found = find_goodput(setup, setup.truth(0), "bullet", workload, 0, Slo("x", 0.1, 0.02))
    assert (found.goodput.value, found.goodput.high) == (0.0, 0.0)
    assert "at most 50% of the scored requests" in found.why_none
