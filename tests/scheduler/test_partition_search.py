"""The search against trying everything; prices; and who gives way when not all can be had."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.estimator.estimator import Forecast
from bulletserve.scheduler.outlook import Outlook
from bulletserve.scheduler.partition_search import balanced, cheapest, cut, mixed_within, splits_within
from bulletserve.scheduler.ways import Way, mixed, sliced, split
from tests.scheduler.forecasters import Arithmetic
from tests.scheduler.test_plan_check import SNAPSHOT
from tests.scheduler.world import LATTICE

forecasters = st.builds(
    Arithmetic, beside=st.sampled_from((1.0, 1.3)), ride=st.sampled_from((0.1, 0.9)), row_s=st.sampled_from((0.0, 1e-3))
)
quick = settings(max_examples=200, deadline=None)


@given(forecasters, st.floats(0.0, 0.04), st.sampled_from((0, 2, 4, 6, 8)), st.integers(1, 100))
@quick
def test_the_smallest_decode_share_that_keeps_the_limit_is_found_from_anywhere(
    physics: Arithmetic, limit_s: float, in_use: int, rows: int
) -> None:
    outlook = Outlook(SNAPSHOT._replace(decode_rows=rows), physics)
    batch = outlook.batch([(500, 0)])
    found = splits_within(outlook, batch, LATTICE.splits, limit_s, in_use)
    fitting = [way for way in (split(outlook, batch, p) for p in LATTICE.splits) if way.decode_s <= limit_s]
    if not fitting:
        assert found == []
        return
    (way,) = found
    assert way.decode_s == max(each.decode_s for each in fitting)


@given(forecasters, st.floats(0.0, 0.5), st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.integers(1, 200))
@quick
def test_the_largest_chunk_that_keeps_the_limit_is_found(
    physics: Arithmetic, limit_s: float, lengths: list[int], rows: int
) -> None:
    outlook = Outlook(SNAPSHOT._replace(decode_rows=rows), physics)
    prompts = [(tokens, 0) for tokens in lengths]
    found = mixed_within(outlook, prompts, rows, 8192 - rows, limit_s)
    whole = mixed(outlook, cut(prompts, 8192 - rows))
    if whole.decode_s <= limit_s:
        assert found == [whole]
    for way in found:
        assert way.decode_s <= limit_s
        assert way.tokens == min(sum(lengths), 8192 - rows) or (way.tokens + rows) % 128 == 0
    least = mixed(outlook, cut(prompts, (rows // 128 + 1) * 128 - rows))
    assert bool(found) == (least.decode_s <= limit_s or whole.decode_s <= limit_s)


def test_no_smaller_chunk_is_asked_about_where_a_larger_one_costs_too_much() -> None:
    asked: list[int] = []

    class Counting(Arithmetic):
        def predict(self, step: StepShape, partition: Partition, alongside: StepShape | None = None) -> Forecast:
            if step.kind == "mixed":
                asked.append(step.prefill_tokens)
            return super().predict(step, partition, alongside)

    # 40 decode rows cost 8 ms in a chunk of any size. 88 tokens would keep the limit, 216 are looked at first.
    outlook = Outlook(SNAPSHOT._replace(decode_rows=40), Counting(ride=1.0))
    (way,) = mixed_within(outlook, [(1000, 0)], 40, 8000, 0.020)
    assert asked == [216, 88]
    assert way.tokens == 88
    asked.clear()
    assert mixed_within(outlook, [(1000, 0)], 40, 8000, 0.020, most_price_s=lambda: 0.007) == []
    assert asked == [216]


def test_prompts_are_cut_where_the_tokens_end() -> None:
    assert cut([(5, 2), (7, 0)], 0) == []
    assert cut([(5, 2), (7, 0)], 5) == [(5, 2)]
    assert cut([(5, 2), (7, 0)], 6) == [(5, 2), (1, 0)]
    assert cut([(5, 2), (7, 0)], 100) == [(5, 2), (7, 0)]


def test_a_price_is_the_time_less_what_prefill_gained() -> None:
    physics = Arithmetic(beside=1.0, ride=0.5, row_s=0.0)
    outlook = Outlook(SNAPSHOT, physics)
    batch = outlook.batch([(1000, 0)])
    assert sliced(outlook).price_s == pytest.approx(4e-3)
    # On half of the SMs decode is as fast as ever, and prefill half as fast as on all.
    way = split(outlook, batch, Partition(4, 4))
    assert (way.decode_s, way.price_s) == (pytest.approx(4e-3), pytest.approx(2e-3))
    # In a mixed step decode costs half of what it costs alone.
    assert mixed(outlook, [(300, 0)]).price_s == pytest.approx(2e-3)


def test_what_is_under_way_stays_unless_something_is_cheaper_by_enough() -> None:
    old, new = Way("split", Partition(4, 4), 0.01, 0.0050), Way("split", Partition(6, 2), 0.01, 0.0049)
    assert cheapest([old, new], lambda way: 0.95 if way is old else 1.0) is old
    assert cheapest([old, new._replace(price_s=0.004)], lambda way: 0.95 if way is old else 1.0).price_s == 0.004


def test_the_balanced_way_gives_both_phases_the_same_part_of_what_they_need() -> None:
    ways = [
        Way("sliced", Partition(0, 8), 0.009, 0.009),
        Way("split", Partition(4, 4), 0.011, 0.007),
        Way("split", Partition(6, 2), 0.020, 0.008),
    ]
    assert balanced(ways, 0.010, 0.5).partition == Partition(4, 4)
    assert balanced(ways, 0.010, 0.0).kind == "sliced"
    assert balanced(ways, 0.010, 9.0).partition == Partition(6, 2)
    # A step on the whole device that begins so much later is no longer the fast one.
    assert balanced(ways, 0.010, 0.0, 0.005).kind == "split"
