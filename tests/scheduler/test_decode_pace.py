"""When the next decode step is due, and how debts are paid."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.slo import NO_DEADLINE_S
from bulletserve.core.snapshot import ClassLoad, Snapshot
from bulletserve.scheduler.answer_lengths import AnswerLengths
from bulletserve.scheduler.decode_pace import BACKLOG_PACE, FREE_PACE, MOST_DEBT_TOKENS, pace
from tests.scheduler.test_plan_check import SNAPSHOT


def loaded(*classes: tuple[float, float], answer_tokens: int = 0) -> Snapshot:
    """Classes as (slack, target)."""
    loads = tuple(ClassLoad("a", 1, 10, slack_s, target_s) for slack_s, target_s in classes)
    return SNAPSHOT._replace(decode_classes=loads, answer_tokens=answer_tokens)


def test_the_strictest_target_and_the_least_slack_count() -> None:
    found = pace(loaded((0.5, 0.02), (0.1, 0.05)), 0.005, 0.0, 0.1)
    assert (found.interval_s, found.due_s) == (pytest.approx(0.018), 0.1)
    assert found.limit_s == found.interval_s


def test_without_targets_decode_keeps_a_pace_of_its_own() -> None:
    found = pace(loaded((NO_DEADLINE_S, NO_DEADLINE_S)), 0.005, 0.0, 0.1)
    assert found == (FREE_PACE * 0.005, FREE_PACE * 0.005, FREE_PACE * 0.005, 0.0)
    rarer = pace(loaded((NO_DEADLINE_S, NO_DEADLINE_S)), 0.005, 0.0, 0.1, backlog=True)
    assert rarer.interval_s == BACKLOG_PACE * 0.005
    with_target = loaded((0.1, 0.02))
    assert pace(with_target, 0.005, 0.0, 0.1, backlog=True) == pace(with_target, 0.005, 0.0, 0.1)


def test_short_answers_catch_up_at_once_and_long_ones_in_a_quiet_moment() -> None:
    short = pace(loaded((-0.01, 0.02), answer_tokens=7), 0.005, 0.0, 0.0)
    assert 0.014 <= short.limit_s < 0.017
    assert short.allowance_s == 0.0
    long = pace(loaded((-0.01, 0.02), answer_tokens=50), 0.005, 0.0, 0.0)
    assert long.limit_s == 0.02
    assert long.allowance_s == pytest.approx(5 * 0.02)
    longest = pace(loaded((-0.01, 0.02), answer_tokens=5000), 0.005, 0.0, 0.0)
    assert longest.allowance_s == pytest.approx(MOST_DEBT_TOKENS * 0.02)


@given(st.lists(st.integers(1, 50), max_size=300))
@settings(deadline=None)
def test_the_first_decile_of_the_last_hundred_answers(lengths: list[int]) -> None:
    known = AnswerLengths()
    assert known.short_tokens == 0
    for at, tokens in enumerate(lengths):
        known.add(tokens)
        last = sorted(lengths[max(0, at - 99) : at + 1])
        assert known.short_tokens == last[len(last) // 10]
