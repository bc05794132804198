"""`bullet` over the simulated executor: what it starts on devices of known physics, and what it promises."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from random import Random
from statistics import fmean
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.errors import ConfigError
from bulletserve.core.events import Event, StepDone
from bulletserve.core.plan import DecodeStep, MixedStep, Plan, PrefillGroup
from bulletserve.core.request import Request
from bulletserve.core.slo import Slo
from bulletserve.core.snapshot import Limits, Snapshot
from bulletserve.estimator.calibration import load
from bulletserve.estimator.estimator import Estimator
from bulletserve.scheduler.policies import bullet, make_policy
from bulletserve.scheduler.policies.bullet import MIXED_LONGER, Bullet
from bulletserve.scheduler.policy import Forecaster
from bulletserve.scheduler.queue_rules import PATIENCE_S
from bulletserve.scheduler.state import State
from bulletserve.simulation import calibration_file
from bulletserve.simulator.device import SimulatedDevice
from bulletserve.simulator.engine import limits_of
from bulletserve.simulator.run import Simulation, drain, prepare, submit
from bulletserve.simulator.truth import ModelTruth
from tests.scheduler.forecasters import Arithmetic, ArithmeticTruth
from tests.scheduler.world import LATTICE, TOTAL_SMS

STARVATION_BOUND_S = 10.0
LIMITS = Limits(
    num_layers=8,
    block_size=16,
    total_blocks=4000,
    max_seqs=64,
    group_token_layers=800,
    batch_tokens=1024,
    lattice=LATTICE,
    one_group_tokens=32,
)


def serve(requests: list[Request], physics: Arithmetic, policy: str = "bullet") -> tuple[Simulation, list[Plan]]:
    """Run requests on a device that does exactly what is forecast, without a host's delay; the plans made."""
    plans: list[Plan] = []

    def observe(now_s: float, events: object, made: object) -> None:
        plans.extend(made)  # type: ignore[arg-type]

    truth = ArithmeticTruth(physics)
    device = SimulatedDevice(truth, LIMITS.num_layers)
    simulation = prepare(LIMITS, make_policy(policy), truth, estimator=physics, device=device, observer=observe)
    submit(simulation, requests)
    drain(simulation)
    return simulation, plans


def stream(count: int, gap_s: float, slo: Slo, tokens: int = 400, output: int = 40) -> list[Request]:
    return [Request(i, range(tokens), output, i * gap_s, slo=slo) for i in range(count)]


def starts(plans: list[Plan]) -> list[PrefillGroup | DecodeStep | MixedStep]:
    return [start for plan in plans for start in plan.starts]


def test_where_lanes_harm_each_other_it_never_splits() -> None:
    physics = Arithmetic(beside=4.0, ride=0.1)
    _, plans = serve(stream(40, 0.045, Slo("a", 1.0, 0.02)), physics)
    assert all(start.sms == TOTAL_SMS for start in starts(plans))
    assert any(isinstance(start, MixedStep) for start in starts(plans))


def test_where_a_mixed_step_saves_nothing_it_splits() -> None:
    physics = Arithmetic(beside=1.0, ride=1.0)
    _, plans = serve(stream(40, 0.06, Slo("a", 1.0, 0.008)), physics)
    made = starts(plans)
    assert not any(isinstance(start, MixedStep) for start in made)
    shared = [start for start in made if start.sms < TOTAL_SMS]
    assert {type(start) for start in shared} == {PrefillGroup, DecodeStep}
    assert len(shared) > 100


@pytest.mark.parametrize(
    ("physics", "target_s"),
    [(Arithmetic(beside=4.0, ride=0.1), 0.02), (Arithmetic(beside=1.0, ride=1.0), 0.008), (Arithmetic(), 0.012)],
    ids=["mixed wins", "split wins", "neither by much"],
)
def test_it_meets_at_least_as_many_targets_as_any_single_way(physics: Arithmetic, target_s: float) -> None:
    slo = Slo("a", 0.3, target_s)
    rng = Random(3)
    requests = [Request(i, range(rng.randint(50, 900)), rng.randint(5, 60), i * 0.055, slo=slo) for i in range(150)]

    def met(policy: str) -> int:
        simulation, _ = serve(requests, physics, policy)
        return sum(answer.meets(slo) for answer in simulation.collector.answers.values())

    others = ("time_sliced", "static_split", "chunked_prefill:budget=128", "chunked_prefill:budget=512")
    assert met("bullet") >= max(met(policy) for policy in others)


def test_reasons_name_the_way_and_its_forecast() -> None:
    _, plans = serve(stream(10, 0.03, Slo("a", 1.0, 0.01)), Arithmetic(beside=1.0, ride=1.0))
    reasons = " | ".join(plan.because for plan in plans)
    assert "split, decode on" in reasons
    assert "ms a step at a price of" in reasons
    assert all(plan.because for plan in plans)


def test_a_lane_alone_has_the_whole_device() -> None:
    simulation, plans = serve([Request(0, range(900), 20, 0.0, slo=Slo("a", 1.0, 0.1))], Arithmetic())
    assert all(start.sms == TOTAL_SMS for start in starts(plans))
    (answer,) = simulation.collector.answers.values()
    assert answer.ttft_s == pytest.approx(900e-4)


@given(
    tokens=st.integers(1, 5000),
    output=st.integers(1, 60),
    ttft_room=st.floats(1.01, 3.0),
    tpot_room=st.floats(1.06, 3.0),
    beside=st.sampled_from((1.0, 1.5, 4.0)),
)
@settings(max_examples=100, deadline=None)
def test_a_lone_request_whose_targets_can_be_met_meets_them(
    tokens: int, output: int, ttft_room: float, tpot_room: float, beside: float
) -> None:
    physics = Arithmetic(beside=beside)
    slo = Slo("a", ttft_room * physics.seconds(tokens, 0, TOTAL_SMS), tpot_room * physics.seconds(0, 1, TOTAL_SMS))
    simulation, _ = serve([Request(0, range(tokens), output, 1.0, slo=slo)], physics)
    assert simulation.collector.answers[0].meets(slo)


@given(seed=st.integers(0, 1000), beside=st.sampled_from((1.0, 1.3, 4.0)))
@settings(max_examples=15, deadline=None)
def test_nobody_starves_below_full_load(seed: int, beside: float) -> None:
    """At about 70 % of what the device can do: long prompts that are always in the way, requests without targets, and
    some whose targets nobody could meet, among many short ones."""
    rng, physics = Random(seed), Arithmetic(beside=beside)
    slos = (Slo("short", 0.2, 0.02), Slo("short", 0.2, 0.02), Slo("best_effort"), Slo("hopeless", 0.001, 0.02))
    requests: list[Request] = []
    at_s = 0.0
    for number in range(300):
        tokens = rng.choice((50, 100, 200, 200, 3000))
        requests.append(Request(number, range(tokens), rng.randint(1, 30), at_s, slo=rng.choice(slos)))
        at_s += rng.expovariate(1.0) * 0.11
    simulation, _ = serve(requests, physics)
    assert max(answer.ttft_s for answer in simulation.collector.answers.values()) < STARVATION_BOUND_S


@pytest.mark.parametrize("policy", ["bullet", "chunked_prefill:budget=512,ordering=slack,admission=triage"])
@pytest.mark.parametrize("slo", [Slo("best_effort"), Slo("hopeless", 0.001, 0.05), Slo("hard", 1.0, 0.05)])
def test_a_long_prompt_that_is_overdue_does_not_wait_for_a_quiet_moment(policy: str, slo: Slo) -> None:
    """At even gaps with nine tenths of its time for prompts that are in time, the device never has one."""
    short = [Request(i, range(800), 5, i * 0.089, slo=Slo("short", 0.3, 0.05)) for i in range(500)]
    simulation, _ = serve([*short, Request(500, range(3000), 2, 0.95, slo=slo)], Arithmetic(), policy)
    due_s = PATIENCE_S if slo.ttft_s is None else slo.ttft_s
    assert simulation.collector.answers[500].ttft_s < due_s + PATIENCE_S + 2.0


def test_decode_pauses_only_as_long_as_it_may() -> None:
    """Answers far ahead of their targets: a prompt has the device, but no gap grows beyond the bound."""
    slo = Slo("a", 2.0, 0.05)
    requests = [*stream(4, 0.0, slo, tokens=50, output=200), Request(9, range(4000), 2, 0.5, slo=slo)]
    simulation, plans = serve(requests, Arithmetic(), "bullet:longest_gap=2")
    assert any(plan.because.startswith("pause") for plan in plans)
    gaps = [gap for number in range(4) for gap in simulation.collector.answers[number].gaps_s]
    assert max(gaps) <= 2 * 0.05
    _, plans = serve(requests, Arithmetic(), "bullet:longest_gap=2,pause=no")
    assert not any(plan.because.startswith("pause") for plan in plans)


@pytest.mark.parametrize("short_s", [0.0, 0.1])
@pytest.mark.parametrize("mixed_longer", [1.1, MIXED_LONGER])
@given(seed=st.integers(0, 1000), beside=st.sampled_from((1.0, 1.3)), ride=st.sampled_from((0.3, 0.8)))
@settings(max_examples=10, deadline=None)
def test_gaps_are_no_longer_than_the_target_and_first_ones_than_two(
    mixed_longer: float, short_s: float, seed: int, beside: float, ride: float
) -> None:
    """Where forecasts are right and some way keeps the pace; a mixed step may take longer. A prompt that ends
    waits for the step under way, never for one that is queued behind it."""
    rng, physics = Random(seed), Arithmetic(beside=beside, ride=ride)
    slo = Slo("a", 0.3, 0.012)
    requests, at_s = [], 0.0
    for number in range(150):
        requests.append(Request(number, range(rng.choice((20, 100, 300, 1500))), rng.randint(2, 60), at_s, slo=slo))
        at_s += rng.expovariate(1.0) * 0.08
    with patch.object(bullet, "SHORT_TARGET_S", short_s):
        simulation, _ = serve(requests, physics, f"bullet:{mixed_longer=}")
    gaps = [answer.gaps_s for answer in simulation.collector.answers.values()]
    assert max(gap for each in gaps for gap in each[1:]) <= 0.012 * mixed_longer
    assert max(each[0] for each in gaps) <= 2 * 0.012 * 1.125


def test_newcomers_are_rows_of_what_is_queued_behind_their_prompt() -> None:
    """Decode is queued behind the last group of a batch, and its newcomers have their second token with that step."""
    rng, slo = Random(1), Slo("a", 0.3, 0.012)
    arrivals = [(rng.choice((20, 100, 300, 1500)), rng.randint(2, 60), rng.expovariate(1.0) * 0.08) for _ in range(150)]
    at_s = list(accumulate(gap_s for *_, gap_s in arrivals))
    requests = [Request(n, range(size), more, at_s[n], slo=slo) for n, (size, more, _) in enumerate(arrivals)]

    def first_gap_s() -> float:
        simulation, plans = serve(requests, Arithmetic(beside=1.1, ride=0.3))
        behind = [plan for plan in plans if plan.because.startswith("newcomers join")]
        assert behind and all(plan.starts == (DecodeStep(TOTAL_SMS),) for plan in behind)
        return fmean(answer.gaps_s[0] for answer in simulation.collector.answers.values())

    with_s = first_gap_s()
    with patch.object(State, "_join_ahead", lambda self, now_s: None):
        assert with_s < 0.95 * first_gap_s()


def decode_steps(requests: list[Request], policy: str, host_s: float) -> list[tuple[float, float, int]]:
    """When each began and ended, and its rows, on a device whose host takes a while to launch."""
    steps: list[object] = []
    found: list[tuple[float, float, int]] = []

    def observe(now_s: float, events: Sequence[Event], plans: Sequence[Plan]) -> None:
        done = [event for event in events if isinstance(event, StepDone)]
        found.extend(
            (one.started_s, one.finished_s, len(one.tokens))
            for one in done
            if isinstance(steps[one.step_id], DecodeStep)
        )
        steps.extend(start for plan in plans for start in plan.starts)

    physics = Arithmetic()
    truth = ArithmeticTruth(physics)
    device = SimulatedDevice(truth, LIMITS.num_layers, host_s=host_s)
    simulation = prepare(LIMITS, make_policy(policy), truth, estimator=physics, device=device, observer=observe)
    submit(simulation, requests)
    drain(simulation)
    return found


def test_with_short_targets_no_decode_step_begins_late_for_prompts_that_outlast_the_one_under_way() -> None:
    """Two answers, and a prompt whose one group lasts for several of their steps. Unless they are queued ahead, each of
    these begins as late as the host is slow. The prompt's answer joins no later for it."""
    host_s, slo = 0.001, Slo("a", 0.3, 0.012)
    requests = [*stream(2, 0.0, slo, tokens=20, output=60), Request(2, range(600), 20, 0.1, slo=slo)]
    late, joined = {}, {}
    for ahead, short_s in (("no", 0.0), ("yes", 0.1)):
        with patch.object(bullet, "SHORT_TARGET_S", short_s):
            steps = decode_steps(requests, "bullet:ways=split", host_s)
        beside = [step for step in steps if step[0] > 0.1 and step[2] == 2]
        waits_s = [later[0] - earlier[1] for earlier, later in pairwise(beside)]
        late[ahead] = sum(wait_s > 0.9 * host_s for wait_s in waits_s)
        joined[ahead] = min(began_s for began_s, _, rows in steps if rows == 3)
    assert late["yes"] < late["no"], late
    assert joined["yes"] <= joined["no"] + 1e-9


def test_a_prompt_that_is_late_for_certain_does_not_slow_the_answers_down() -> None:
    """No split keeps 5.5 ms, so the balanced way is taken: 11.4 ms a step while the prompt may still be in time. Once
    it cannot, its need is no reason to starve the answers."""
    slo, hopeless = Slo("a", 2.0, 0.0055), Slo("hopeless", 0.3, 0.0055)
    requests = [*stream(4, 0.0, slo, tokens=50, output=200), Request(9, range(2500), 2, 0.5, slo=hopeless)]
    simulation, _ = serve(requests, Arithmetic(beside=1.3))
    gaps = [gap for number in range(4) for gap in simulation.collector.answers[number].gaps_s[1:]]
    assert max(gaps) < 0.012


def test_a_mixed_step_that_is_cheaper_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 where targets are tight: a split could begin beside the two decode steps that are ahead."""
    calibration = load(calibration_file("84138869b7c4"))
    estimator = Estimator(calibration, calibration.provenance.shape)
    truth = ModelTruth(calibration.parameters, calibration.total_sms, calibration.provenance.shape)
    plans: list[Plan] = []
    decide = Bullet.decide

    def listen(self: Bullet, snapshot: Snapshot, forecasts: Forecaster) -> Plan:
        plans.append(decide(self, snapshot, forecasts))
        return plans[-1]

    monkeypatch.setattr(Bullet, "decide", listen)
    simulation = prepare(limits_of(estimator), make_policy("bullet"), truth, estimator=estimator)
    rng, slo = Random(3), Slo("tight", 0.3, 0.008)
    lengths = [(rng.randint(100, 2500), rng.randint(50, 300)) for _ in range(60)]
    submit(simulation, [Request(i, range(new), out, i * 0.07, slo=slo) for i, (new, out) in enumerate(lengths)])
    drain(simulation)
    ahead = [plan for plan in plans if plan.because.startswith("next, mixed")]
    assert ahead and not any(plan.starts for plan in ahead)
    assert sum(isinstance(start, MixedStep) for start in starts(plans)) >= len(ahead)


def test_it_needs_forecasts_and_says_so_at_once() -> None:
    with pytest.raises(ConfigError, match="run bullet calibrate"):
        prepare(LIMITS, Bullet(), ArithmeticTruth(Arithmetic()))
