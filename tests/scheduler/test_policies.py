"""Policies as pure functions: whatever a snapshot shows, the plan keeps the rules; and what each is known for."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulletserve.core.errors import ConfigError
from bulletserve.core.plan import DecodeStep, MixedStep, PrefillGroup
from bulletserve.core.snapshot import MAX_RANGE_TOKENS, AdmittedEntry, PrefillProgress, Snapshot, WaitingEntry
from bulletserve.scheduler.batching import OVERTAKE_S, admissions, next_group, prompt_ranges
from bulletserve.scheduler.plan_check import plan_check
from bulletserve.scheduler.policies import POLICIES, make_policy
from bulletserve.scheduler.policies.bullet import Bullet
from bulletserve.scheduler.policies.chunked_prefill import ChunkedPrefill
from bulletserve.scheduler.policies.static_split import StaticSplit
from bulletserve.scheduler.policies.time_sliced import TimeSliced
from bulletserve.scheduler.policy import NoForecasts, Policy
from bulletserve.scheduler.queue_rules import ADMISSIONS, ORDERINGS
from tests.examples import examples
from tests.scheduler.cases import snapshots
from tests.scheduler.forecasters import FORECASTS, Arithmetic
from tests.scheduler.test_plan_check import SNAPSHOT
from tests.scheduler.world import TOTAL_SMS

many = settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
NO_FORECASTS = NoForecasts()
budgets = st.sampled_from((0, 1, 2, 7, 64, 2048, 100_000))
parts = {"ordering": st.sampled_from(tuple(ORDERINGS)), "admission": st.sampled_from(ADMISSIONS)}
ways = st.sampled_from(("split+sliced+mixed", "split", "sliced", "mixed", "split+mixed"))
policies = st.one_of(
    st.builds(TimeSliced, budgets, **parts),
    st.builds(ChunkedPrefill, budgets, **parts),
    st.builds(StaticSplit, st.sampled_from((0.01, 0.5, 0.9)), budgets, st.sampled_from(("whole", "share")), **parts),
    st.builds(Bullet, ways=ways, pause=st.sampled_from(("yes", "no")), margin=st.sampled_from((0.0, 0.05)), **parts),
)
forecasters = st.builds(
    Arithmetic,
    beside=st.sampled_from((1.0, 1.2, 4.0)),
    ride=st.sampled_from((0.1, 1.0)),
    row_s=st.sampled_from((0, 1e-3)),
)


@given(snapshot=snapshots(), policy=policies, forecasts=forecasters)
@settings(many, max_examples=examples(400))
def test_every_plan_keeps_the_rules(snapshot: Snapshot, policy: Policy, forecasts: Arithmetic) -> None:
    plan = policy.decide(snapshot, forecasts)
    plan_check(snapshot, plan)
    assert policy.decide(snapshot, forecasts) == plan
    assert plan.because


@given(snapshot=snapshots(), policy=policies)
@settings(many, max_examples=examples(150))
def test_a_snapshot_read_back_is_the_same_and_decides_the_same(snapshot: Snapshot, policy: Policy) -> None:
    plan = policy.decide(snapshot, FORECASTS)  # fills the lattice's caches
    read = msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot)
    assert read == snapshot
    assert policy.decide(read, FORECASTS) == plan


def waiting(*tokens: int, arrival_s: float = 0.0) -> tuple[WaitingEntry, ...]:
    return tuple(WaitingEntry(i, arrival_s, n, -(-n // 4), 1e18, "a") for i, n in enumerate(tokens))


EMPTY = SNAPSHOT._replace(
    waiting=(), waiting_total=0, admitted=(), decode_rows=0, decode_blocks_needed=0, free_blocks=100
)


def test_admissions_stop_at_the_wanted_tokens() -> None:
    snapshot = EMPTY._replace(waiting=waiting(8, 8, 8), free_seats=8)
    assert admissions(snapshot, 1) == (0,)
    assert admissions(snapshot, 8) == (0,)
    assert admissions(snapshot, 9) == (0, 1)
    assert admissions(snapshot, 100) == (0, 1, 2)


def test_admissions_stop_at_the_seats() -> None:
    assert admissions(EMPTY._replace(waiting=waiting(8, 8, 8), free_seats=2), 100) == (0, 1)
    assert admissions(EMPTY._replace(waiting=waiting(8), free_seats=0), 100) == ()


def test_admissions_leave_a_block_for_everyone_who_runs() -> None:
    snapshot = EMPTY._replace(waiting=waiting(8, 8), free_seats=8, free_blocks=4)
    assert admissions(snapshot, 100) == (0, 1)
    assert admissions(snapshot._replace(decode_rows=1), 100) == (0,)
    assert admissions(snapshot._replace(decode_rows=2, prefilling_rows=1), 100) == ()


def test_small_requests_pass_one_that_does_not_fit_but_not_for_ever() -> None:
    snapshot = EMPTY._replace(waiting=waiting(80, 8), free_seats=8, free_blocks=4, decode_rows=1)
    assert admissions(snapshot._replace(now_s=OVERTAKE_S), 100) == (1,)
    assert admissions(snapshot._replace(now_s=OVERTAKE_S + 0.1), 100) == ()


def test_an_empty_engine_admits_its_first_request_with_every_block_it_has() -> None:
    snapshot = EMPTY._replace(waiting=waiting(400), prefilling_rows=0, free_blocks=100)
    assert admissions(snapshot, 1) == (0,)


def admitted(*lengths: tuple[int, int]) -> tuple[AdmittedEntry, ...]:
    return tuple(AdmittedEntry(i, 0.0, end, start, 1e18, "a") for i, (start, end) in enumerate(lengths))


def test_prompts_are_cut_at_the_budget_and_at_the_longest_range() -> None:
    snapshot = EMPTY._replace(admitted=admitted((0, 10), (4, 10), (0, 9000)))
    assert prompt_ranges(snapshot, 3) == ((0,), ((0, 3),))
    assert prompt_ranges(snapshot, 12) == ((0, 1), ((0, 10), (4, 6)))
    assert prompt_ranges(snapshot, 100_000) == ((0, 1, 2), ((0, 10), (4, 10), (0, MAX_RANGE_TOKENS)))
    assert prompt_ranges(snapshot, 0) == ((), ())


@pytest.mark.parametrize(
    ("tokens", "first", "group"),
    [(8, 0, (0, 8)), (16, 0, (0, 4)), (16, 4, (4, 8)), (16, 3, (3, 8)), (16, 2, (2, 8)), (1000, 0, (0, 1))],
)
def test_layer_groups_are_sized_by_their_work_and_leave_no_scrap(
    tokens: int, first: int, group: tuple[int, int]
) -> None:
    """64 token layers make a group; what is left after it joins it when it is at most half of one."""
    snapshot = EMPTY._replace(admitted=admitted((0, tokens)))
    if first:
        started = next_group(snapshot, tokens, 4)
        assert started is not None
        progress = PrefillProgress(started.requests, started.token_ranges, first)
        snapshot = snapshot._replace(admitted=(), prefill=progress)
    step = next_group(snapshot, tokens, 4)
    assert step is not None
    assert step.layer_range == group
    whole = next_group(snapshot, tokens, 4, whole=True)
    assert whole is not None
    assert whole.layer_range == (first, 8)


def test_time_sliced_runs_waiting_prompts_first_and_nothing_beside_them() -> None:
    plan = TimeSliced(64).decide(SNAPSHOT._replace(waiting=(), waiting_total=0), NO_FORECASTS)
    assert [type(start) for start in plan.starts] == [PrefillGroup]
    assert plan.starts[0].sms == TOTAL_SMS
    assert TimeSliced(64).decide(SNAPSHOT._replace(prefilling_rows=1), NO_FORECASTS).is_empty


def test_chunked_prefill_fills_what_decode_leaves_of_the_budget() -> None:
    snapshot = SNAPSHOT._replace(waiting=(), waiting_total=0)
    (step,) = ChunkedPrefill(6).decide(snapshot, NO_FORECASTS).starts
    assert isinstance(step, MixedStep)
    assert step.token_ranges == ((4, 8),)
    (step,) = ChunkedPrefill(2).decide(snapshot, NO_FORECASTS).starts
    assert isinstance(step, DecodeStep)


def test_static_split_keeps_both_lanes_busy_on_their_shares() -> None:
    snapshot = SNAPSHOT._replace(waiting=(), waiting_total=0)
    decode, group = StaticSplit(0.25).decide(snapshot, NO_FORECASTS).starts
    assert isinstance(decode, DecodeStep)
    assert isinstance(group, PrefillGroup)
    assert (decode.sms, group.sms) == (2, 6)
    alone = snapshot._replace(admitted=())
    assert [start.sms for start in StaticSplit(0.25).decide(alone, NO_FORECASTS).starts] == [8]
    assert [start.sms for start in StaticSplit(0.25, alone="share").decide(alone, NO_FORECASTS).starts] == [2]


def test_policies_are_made_from_text() -> None:
    assert make_policy("chunked_prefill:budget=512") == ChunkedPrefill(512)
    assert make_policy("static_split:decode_fraction=0.3,alone=share") == StaticSplit(0.3, alone="share")
    for name in POLICIES:
        assert make_policy(name).name == name


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vllm", "no policy is called 'vllm'; there are bullet, chunked_prefill, static_split, time_sliced"),
        ("chunked_prefill:chunk=3", "has no option 'chunk'; it has ordering, admission, budget"),
        ("chunked_prefill:budget=many", "option budget must be of type int"),
        ("chunked_prefill:budget=-1", "budget must be at least 1"),
        ("time_sliced:ordering=lifo", "ordering must be one of fcfs, slack, not 'lifo'"),
        ("chunked_prefill:admission=none", "admission must be one of all, timely, triage, not 'none'"),
        ("time_sliced:batch_tokens=-1", "batch_tokens must be at least 1"),
        ("static_split:batch_tokens=-1", "batch_tokens must be at least 1"),
        ("static_split:decode_fraction=1", "decode_fraction must lie between 0 and 1"),
        ("bullet:ways=fast", "ways must be some of split, sliced, mixed"),
        ("bullet:pause=maybe", "pause must be yes or no"),
        ("bullet:margin=1", "margin must be at least 0 and below 1"),
        ("bullet:longest_gap=0.5", "longest_gap must be at least 1"),
        ("bullet:mixed_longer=0.9", "mixed_longer must be at least 1"),
        ("bullet:mixed_longer=nan", "mixed_longer must be at least 1"),
        ("static_split:alone=never", "alone must be 'whole' or 'share'"),
    ],
)
def test_a_policy_that_cannot_be_is_explained(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(spec)
