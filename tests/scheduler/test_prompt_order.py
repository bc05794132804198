"""Which prompts next: against all subsets tried; and how batches end."""

from itertools import accumulate, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.slo import NO_DEADLINE_S
from bulletserve.core.snapshot import MAX_RANGE_TOKENS, AdmittedEntry, WaitingEntry
from bulletserve.scheduler.outlook import Outlook
from bulletserve.scheduler.prompt_order import (
    PREFILL_SPEED,
    TURN_EVERY_S,
    TURN_S,
    in_given_order,
    most_in_time,
    next_batch,
)
from bulletserve.scheduler.queue_rules import PATIENCE_S
from tests.scheduler.forecasters import FORECASTS
from tests.scheduler.test_plan_check import SNAPSHOT

TOKEN_S = FORECASTS.token_s / PREFILL_SPEED
EMPTY = SNAPSHOT._replace(admitted=(), waiting=(), now_s=10.0)
prompts = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 100)), max_size=6)


def entry(number: int, tokens: int, deadline_s: float, priority: int = 0) -> WaitingEntry:
    return WaitingEntry(number, 0.0, tokens, 1, deadline_s, "a", priority)


@given(prompts)
@settings(deadline=None)
def test_no_other_order_has_more_prompts_in_time(asked: list[tuple[int, int]]) -> None:
    """`asked`: tokens, and the deadline in tokens of work from now."""
    waiting = tuple(entry(n, tokens, 10.0 + due * TOKEN_S) for n, (tokens, due) in enumerate(asked))
    order = most_in_time(EMPTY._replace(waiting=waiting), Outlook(EMPTY, FORECASTS))
    assert sorted(e.request_id for e in order.entries) == list(range(len(asked)))

    def in_time(numbers: tuple[int, ...]) -> int:
        done, good = 0, 0
        for n in numbers:
            done += asked[n][0]
            good += done <= asked[n][1] + 1e-6
        return good

    best = max(in_time(numbers) for numbers in permutations(range(len(asked))))
    assert in_time(tuple(e.request_id for e in order.entries)) == best
    assert order.load <= 1 + 1e-9
    if best == len(asked):
        deadlines = [e.deadline_s for e in order.entries]
        assert deadlines == sorted(deadlines)


def test_the_longest_in_the_way_waits_then_those_who_are_late() -> None:
    late = entry(9, 5, 1.0)
    waiting = (entry(0, 30, 10.0 + 40 * TOKEN_S), entry(1, 5, 10.0 + 41 * TOKEN_S), entry(2, 8, 10.0 + 42 * TOKEN_S))
    snapshot = EMPTY._replace(waiting=waiting, late=(late,))
    order = most_in_time(snapshot, Outlook(snapshot, FORECASTS))
    assert [e.request_id for e in order.entries] == [1, 2, 0, 9]
    given_order = in_given_order(snapshot, Outlook(snapshot, FORECASTS))
    assert [e.request_id for e in given_order.entries] == [0, 1, 2, 9]
    assert given_order.load > 1 > order.load


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 100)), max_size=6), st.floats(100.0, 103.0))
@settings(deadline=None, derandomize=True, database=None)
def test_who_is_overdue_for_long_goes_first_for_a_part_of_each_second(
    asked: list[tuple[int, int]], now_s: float
) -> None:
    waiting = tuple(entry(n, tokens, now_s + due * TOKEN_S) for n, (tokens, due) in enumerate(asked))
    long = now_s - PATIENCE_S
    late = (entry(7, 5, long - 1.0), entry(8, 5, long + 1.0))
    patient = entry(9, 1000, NO_DEADLINE_S)
    snapshot = EMPTY._replace(waiting=(patient, *waiting), late=late, now_s=now_s)
    order = [e.request_id for e in most_in_time(snapshot, Outlook(snapshot, FORECASTS)).entries]
    assert sorted(order) == sorted([*range(len(asked)), 7, 8, 9])
    if now_s % TURN_EVERY_S < TURN_S:
        assert set(order[: order.index(7)]) <= {9}  # which sorts first by itself, or is behind for making others late
        assert order[-1] == 8
    else:
        assert order[-2:] == [7, 8]


def test_the_turn_of_the_overdue_does_not_go_before_a_priority() -> None:
    waiting = tuple(entry(n, 5, 100.5, priority=-5) for n in range(3)) + (entry(3, 5, 100.5, priority=9),)
    late = tuple(entry(n, 20, 50.0, priority=9) for n in (7, 8))
    snapshot = EMPTY._replace(waiting=waiting, late=late, now_s=100.05)
    order = most_in_time(snapshot, Outlook(snapshot, FORECASTS))
    assert [e.request_id for e in order.entries] == [0, 1, 2, 7, 8, 3]


def test_priority_goes_before_the_deadline_and_no_deadline_means_patience() -> None:
    waiting = (entry(0, 5, 12.0), entry(1, 5, NO_DEADLINE_S), entry(2, 5, 13.0, priority=-1))
    order = most_in_time(EMPTY._replace(waiting=waiting), Outlook(EMPTY, FORECASTS))
    assert [e.request_id for e in order.entries] == [
        2,
        1,
        0,
    ]  # PATIENCE_S after its arrival at 0, number 1 is due at 10


def test_what_is_computed_already_is_no_work() -> None:
    begun = AdmittedEntry(0, 0.0, 100, 95, 10.0 + 6 * TOKEN_S, "a")
    order = most_in_time(EMPTY._replace(admitted=(begun,)), Outlook(EMPTY, FORECASTS))
    assert (tuple(order.admitted), tuple(order.waiting)) == ((begun,), ())
    assert 0.8 < order.load < 0.9


def test_a_batch_ends_when_the_device_is_busy_and_does_not_grow_much_beyond() -> None:
    sizes = [entry(n, tokens, NO_DEADLINE_S) for n, tokens in enumerate((100, 200, 300, 900, 50))]
    assert next_batch(sizes, 1) == 1
    assert next_batch(sizes, 300) == 2
    assert next_batch(sizes, 301) == 3
    assert next_batch(sizes, 601) == 3  # the fourth would make it more than twice as many
    assert next_batch(sizes, 10_000) == 5
    assert next_batch(sizes[3:], 10) == 1


def test_a_long_prompt_lets_short_ones_pass_while_it_has_time() -> None:
    long, shorts = MAX_RANGE_TOKENS + 1000, [entry(n, 50, 10.0 + 30000 * TOKEN_S) for n in (1, 2, 3)]
    for due, expected in ((20000, [1, 2, 3, 0]), (2 * long + 300, [1, 2, 3, 0]), (2 * long + 100, [1, 0, 2, 3])):
        waiting = (entry(0, long, 10.0 + due * TOKEN_S), *shorts)
        order = most_in_time(EMPTY._replace(waiting=waiting), Outlook(EMPTY, FORECASTS))
        assert [e.request_id for e in order.entries] == expected, due
    of_one_range = (entry(0, MAX_RANGE_TOKENS, 10.0 + 29000 * TOKEN_S), *shorts)
    order = most_in_time(EMPTY._replace(waiting=of_one_range), Outlook(EMPTY, FORECASTS))
    assert [e.request_id for e in order.entries] == [0, 1, 2, 3]


lengths = st.one_of(st.integers(1, 600), st.integers(MAX_RANGE_TOKENS, 30_000))


@given(st.lists(st.tuples(lengths, st.integers(1, 150_000), st.sampled_from((0, 0, 0, 1))), max_size=12))
@settings(deadline=None)
def test_giving_way_makes_nobody_late_and_the_mean_no_longer(asked: list[tuple[int, int, int]]) -> None:
    """`asked`: tokens, the deadline in tokens of work from now, priority."""
    waiting = tuple(entry(n, tokens, 10.0 + due * TOKEN_S, prio) for n, (tokens, due, prio) in enumerate(asked))
    order = most_in_time(EMPTY._replace(waiting=waiting), Outlook(EMPTY, FORECASTS)).entries
    assert sorted(e.request_id for e in order) == list(range(len(asked)))
    by_deadline = sorted(asked, key=lambda one: (one[2], one[1]))

    def ends(tokens: list[int]) -> list[int]:
        return list(accumulate(tokens))

    if any(end > due for end, (_, due, _) in zip(ends([one[0] for one in by_deadline]), by_deadline, strict=True)):
        return  # somebody is dropped: see above
    assert [e.priority for e in order] == sorted(e.priority for e in order)
    done = ends([e.prompt_tokens for e in order])
    assert all(end <= asked[e.request_id][1] + 1e-6 for end, e in zip(done, order, strict=True))
    assert sum(done) <= sum(ends([one[0] for one in by_deadline]))
