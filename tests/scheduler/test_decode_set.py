"""The decode set's running sums against sums made anew."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.request import Request
from bulletserve.core.slo import NO_DEADLINE_S, Slo
from bulletserve.scheduler.decode_set import LOST_TOKENS, DecodeSet
from bulletserve.scheduler.job import Job
from tests.scheduler.cases import SLOS

NOW_S = 100.0


class Row:
    """What a row is, counted one step at a time."""

    def __init__(self, number: int, prompt: int, more: int, slo: Slo, first_s: float | None) -> None:
        self.job = Job(Request(number, range(prompt), more, 0.0, slo=slo))
        self.job.seat = 1000 + number
        self.job.kv_tokens = prompt
        self.job.first_token_s = first_s
        self.first_s = NOW_S if first_s is None else first_s
        self.kv_tokens = prompt
        self.drawn = 1
        self.left = more - 1

    def slack_s(self, now_s: float) -> float:
        tpot_s = self.job.request.slo.tpot_s
        return NO_DEADLINE_S if tpot_s is None else self.first_s + self.drawn * tpot_s - now_s


def least_slack_s(rows: list[Row], now_s: float) -> float:
    """The least of those who can still catch up."""
    tpot_s = rows[0].job.request.slo.tpot_s or 0.0
    slacks = [row.slack_s(now_s) for row in rows]
    return min((slack_s for slack_s in slacks if slack_s >= -LOST_TOKENS * tpot_s), default=NO_DEADLINE_S)


@given(
    block_size=st.integers(1, 5),
    moves=st.lists(
        st.tuples(
            st.sampled_from(("join", "join", "leave", "step", "step", "step")),
            st.integers(1, 20),
            st.integers(2, 9),
            st.sampled_from(SLOS),
            st.none() | st.integers(0, 800).map(lambda eighths: eighths / 8),
        ),
        max_size=40,
    ),
)
@settings(max_examples=300, deadline=None)
def test_sums_equal_sums_made_anew(block_size: int, moves: list[tuple[str, int, int, Slo, float | None]]) -> None:
    rows_of = DecodeSet(block_size)
    rows: dict[int, Row] = {}
    for number, (move, prompt, more, slo, first_s) in enumerate(moves):
        if move == "join":
            rows[number] = Row(number, prompt, more, slo, first_s)
            rows_of.join(rows[number].job, NOW_S)
        elif move == "leave" and rows:
            row = rows.pop(sorted(rows)[prompt % len(rows)])
            rows_of.leave(row.job)
            assert row.job.kv_tokens == row.kv_tokens
        elif move == "step":
            full = {job.id for job in rows_of.step()}
            for row in rows.values():
                row.kv_tokens += 1
                row.drawn += 1
                row.left -= 1
            assert full == {row.job.id for row in rows.values() if not row.left}
            for request_id in full:
                row = rows.pop(request_id)
                rows_of.leave(row.job)
                assert row.job.kv_tokens == row.kv_tokens
                assert row.job.is_full
        due = {row.job.id for row in rows.values() if row.kv_tokens % block_size == 0}
        assert {job.id for job in rows_of.due} == due
        assert {row.job.id for row in rows.values() if rows_of.is_due(row.job)} == due
        assert rows_of.blocks_needed == len(due)
        assert rows_of.tokens == sum(row.kv_tokens for row in rows.values())
        assert rows_of.rows == tuple(row.job.seat for row in rows.values())
        assert rows_of.jobs == tuple(row.job for row in rows.values())
        assert rows_of.ids == tuple(rows)
        classes: dict[str, list[Row]] = defaultdict(list)
        for row in rows.values():
            classes[row.job.request.slo.name].append(row)
        now_s = NOW_S + number
        loads = {load.slo_class: load for load in rows_of.loads(now_s)}
        assert loads.keys() == classes.keys()
        for name, members in classes.items():
            assert loads[name].rows == len(members)
            assert loads[name].context_tokens == sum(row.kv_tokens for row in members)
            assert loads[name].least_slack_s == pytest.approx(least_slack_s(members, now_s))


def test_rows_are_the_same_object_until_somebody_joins_or_leaves() -> None:
    rows_of = DecodeSet(4)
    one, two = Row(1, 3, 9, Slo(), None).job, Row(2, 4, 9, Slo(), None).job
    rows_of.join(one, 0.0)
    rows = rows_of.rows
    rows_of.step()
    assert rows_of.rows is rows
    rows_of.join(two, 0.0)
    assert rows_of.rows == (one.seat, two.seat)
    rows_of.leave(one)
    assert rows_of.rows == (two.seat,)


def test_rows_that_left_are_forgotten_also_while_their_class_never_empties() -> None:
    """A fast engine gives each newcomer a smaller key than those had who left."""
    rows_of = DecodeSet(4)
    slo = Slo("chat", 1.0, 0.05)
    staying = Row(0, 3, 10**9, slo, 0.0).job
    rows_of.join(staying, 0.0)
    for number in range(1, 2000):
        passing = Row(number, 3, 9, slo, 0.0).job
        rows_of.join(passing, 0.0)
        rows_of.step()
        rows_of.leave(passing)
    assert rows_of.loads(0.0)[0].least_slack_s == pytest.approx(0.05 * 2000)


def test_a_row_whose_first_token_is_told_late_owes_from_then_on() -> None:
    rows_of = DecodeSet(4)
    job = Row(0, 3, 9, Slo("chat", 1.0, 0.05), None).job
    rows_of.join(job, 1.0)
    rows_of.step()
    rows_of.spoke(job, 1.5)
    assert rows_of.loads(1.5)[0].least_slack_s == pytest.approx(0.10), "its second token counts as told"
    rows_of.leave(job)
    assert rows_of.loads(1.5) == ()


@pytest.mark.parametrize(("rows", "most"), [(0, 0), (1, 1), (4, 1), (5, 2), (12, 3)])
def test_every_row_has_its_turn_once_in_so_many_calls_and_none_is_long(rows: int, most: int) -> None:
    rows_of = DecodeSet(4)
    for number in range(rows + 1):
        rows_of.join(Row(number, 4, 9, SLOS[0], None).job, NOW_S)
    rows_of.leave(rows_of.jobs[rows])
    rounds = [[job.id for job in rows_of.next_in_turn(4)] for _ in range(4)]
    assert max(len(ids) for ids in rounds) == most
    assert sorted(request_id for ids in rounds for request_id in ids) == list(range(rows))
