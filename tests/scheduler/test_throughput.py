"""Everything at once and no target: what is worth most, on devices of known physics."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulletserve.core.request import Request
from bulletserve.core.slo import Slo
from bulletserve.scheduler.decode_pace import BACKLOG_PACE
from bulletserve.scheduler.outlook import Outlook
from bulletserve.scheduler.throughput import BACKLOG_BATCHES, is_backlog, mixed_ways, rate, step_worth_s
from bulletserve.scheduler.ways import sliced
from tests.scheduler.forecasters import Arithmetic
from tests.scheduler.test_bullet import LIMITS, serve
from tests.scheduler.test_partition_search import forecasters, quick
from tests.scheduler.test_plan_check import SNAPSHOT

OTHERS = ("chunked_prefill:budget=512", "chunked_prefill:budget=2048", "chunked_prefill:budget=8192", "time_sliced")
SLACK = 1.03
"""What a policy that looks one step ahead may lose against the best of all that look none."""


def at_once(count: int, slo: Slo | None = None) -> list[Request]:
    slo = slo or Slo("batch")
    return [Request(i, range(300 + 37 * i % 900), 20 + 13 * i % 90, 0.0, slo=slo) for i in range(count)]


def seconds(requests: list[Request], physics: Arithmetic, policy: str) -> float:
    """Until four of five requests have their answer: what comes after is the tail of the longest."""
    simulation, _ = serve(requests, physics, policy)
    ends_s = sorted(answer.token_times_s[-1] for answer in simulation.collector.answers.values())
    return ends_s[len(ends_s) * 4 // 5 - 1]


@pytest.mark.parametrize(
    "physics",
    [Arithmetic(beside=4.0, ride=0.1), Arithmetic(beside=1.0, ride=1.0), Arithmetic(), Arithmetic(row_s=3e-4)],
    ids=["mixed wins", "split wins", "neither by much", "rows cost"],
)
def test_all_at_once_takes_no_longer_than_by_any_single_way(physics: Arithmetic) -> None:
    took = {policy: seconds(at_once(300), physics, policy) for policy in ("bullet", *OTHERS)}
    assert took["bullet"] <= SLACK * min(took[other] for other in OTHERS), took


@pytest.mark.parametrize("beside", [1.0, 1.3, 4.0])
def test_answers_go_on_all_the_same(beside: float) -> None:
    physics = Arithmetic(beside=beside, row_s=1e-4)
    simulation, _ = serve(at_once(60), physics)
    most_s = physics.seconds(0, LIMITS.max_seqs, physics.total_sms)
    for answer in simulation.collector.answers.values():
        gaps_s = [later - earlier for earlier, later in pairwise(answer.token_times_s)]
        assert max(gaps_s) <= (BACKLOG_PACE + 1) * most_s


@given(forecasters, st.integers(1, 60), st.integers(0, 200), st.integers(0, 64), st.integers(0, 4000))
@quick
def test_a_step_for_some_is_worth_at_most_what_it_takes(
    physics: Arithmetic, rows: int, coming: int, seats: int, blocks: int
) -> None:
    snapshot = SNAPSHOT._replace(
        admitted=(),
        prefilling_rows=0,
        decode_rows=rows,
        decode_tokens=100 * rows,
        waiting_total=coming,
        free_seats=seats,
        free_blocks=blocks,
    )
    outlook = Outlook(snapshot, physics)
    worth_s = step_worth_s(snapshot, outlook)
    assert 0.0 < worth_s <= outlook.decode_alone_s * (1 + 1e-9)
    assert rate(sliced(outlook), worth_s) <= 1.0 + 1e-9
    if not coming or not seats:
        assert worth_s == pytest.approx(outlook.decode_alone_s)


@given(forecasters, st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.integers(1, 200), st.floats(0.0, 2.0))
@quick
def test_mixed_steps_keep_the_limit_and_take_no_more_than_there_is(
    physics: Arithmetic, lengths: list[int], rows: int, limit_s: float
) -> None:
    outlook = Outlook(SNAPSHOT._replace(decode_rows=rows), physics)
    for way in mixed_ways(outlook, [(tokens, 0) for tokens in lengths], rows, limit_s):
        assert way.decode_s <= limit_s
        assert way.tokens == sum(lengths) or (way.tokens + rows) % 128 == 0


def test_a_few_prompts_are_no_backlog() -> None:
    tokens = BACKLOG_BATCHES * SNAPSHOT.limits.batch_tokens
    assert is_backlog(SNAPSHOT._replace(waiting_tokens=tokens))
    assert not is_backlog(SNAPSHOT._replace(waiting_tokens=tokens - 1))
