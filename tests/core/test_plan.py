"""Plans and launches say which lanes they load."""

from bulletserve.core.launch import Launch
from bulletserve.core.plan import DecodeStep, Lane, MixedStep, Plan, PrefillGroup, Refusal, lanes_of

DECODE = DecodeStep(8)
MIXED = MixedStep((), (), 8)
GROUP = PrefillGroup((1,), ((0, 4),), (0, 2), 8)


def test_a_mixed_step_counts_on_both_lanes_and_runs_on_prefills() -> None:
    assert [lanes_of(start) for start in (GROUP, DECODE)] == [(Lane.PREFILL,), (Lane.DECODE,)]
    assert lanes_of(MIXED) == (Lane.PREFILL, Lane.DECODE)
    assert [Launch(0, start).lane for start in (GROUP, MIXED, DECODE)] == [Lane.PREFILL, Lane.PREFILL, Lane.DECODE]


def test_a_plan_with_any_part_is_not_empty() -> None:
    assert Plan(because="nothing to do").is_empty
    parts = [Plan(starts=(DECODE,)), Plan(admit=(1,)), Plan(preempt=(1,)), Plan(refuse=(Refusal(1, "no"),))]
    assert not any(plan.is_empty for plan in parts)
