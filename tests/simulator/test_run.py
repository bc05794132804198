"""Whole runs on an H200 made of arithmetic: every policy serves everything, the same way every time."""

import gc
from collections import Counter
from dataclasses import replace

import pytest

from bulletserve.core.errors import ConfigError, PolicyError
from bulletserve.core.launch import Launch
from bulletserve.core.request import FinishReason, Request
from bulletserve.core.slo import Slo
from bulletserve.resources.green_context import SmPool
from bulletserve.resources.manager import usual_shares
from bulletserve.scheduler.policies import POLICIES, make_policy
from bulletserve.simulator.device import SimulatedDevice, counting_token
from bulletserve.simulator.engine import limits_of, usual_splits
from bulletserve.simulator.experiment import arrivals, ignores_targets, run_arm, scored_answers
from bulletserve.simulator.run import drain, made_up, prepare, submit
from bulletserve.telemetry.latency import summarise
from bulletserve.workload.request_list import RequestLengths, at_rate, lognormal_requests
from tests.foreign import Idle
from tests.simulator.devices import h200

REQUESTS = lognormal_requests(40, seed=3)
CHAT = Slo("chat", 0.3, 0.02)


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_gets_its_length_and_a_seed_gives_one_run(name: str) -> None:
    setup = h200()
    truth = setup.truth(5)
    device = SimulatedDevice(truth, setup.limits.num_layers)
    run = prepare(setup.limits, make_policy(name), truth, estimator=setup.estimator, device=device)
    submit(run, made_up(at_rate(REQUESTS, 6.0), CHAT))
    drain(run)
    answers = run.collector.answers
    assert run.collector.open == 0
    for number, request in enumerate(REQUESTS):
        first = request.prompt_tokens
        assert answers[number].finish == FinishReason.LENGTH
        assert answers[number].tokens == [counting_token(number, first + i) for i in range(request.output_tokens)]
    runs = [run_arm(h200(), name, REQUESTS, 6.0, 5, CHAT).collector.answers for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != run_arm(h200(), name, REQUESTS, 6.0, 6, CHAT).collector.answers


@pytest.mark.parametrize("name", POLICIES)
def test_requests_with_grammars_ride_with_a_mask_for_each_token(name: str) -> None:
    """Their tokens are made up as ever; each waits for its mask, so such an answer is in no two steps one after the
    other where free ones are in every step."""
    setup = h200()
    requests = [replace(one, grammar="g" if one.id % 2 else "") for one in made_up(at_rate(REQUESTS, 6.0), CHAT)]
    run = prepare(setup.limits, make_policy(name), setup.truth(5), estimator=setup.estimator)
    masked: Counter[int] = Counter()
    start = run.executor.start

    def counted(launch: Launch) -> None:
        holders.update({seat.seat: seat.request_id for seat in launch.seats})
        masked.update(holders[seat] for seat, _ in launch.masks)
        start(launch)

    holders: dict[int, int] = {}
    run.executor.start = counted  # type: ignore[method-assign]
    submit(run, requests)
    drain(run)
    assert run.collector.open == 0
    for request in requests:
        assert run.collector.answers[request.id].finish == FinishReason.LENGTH
        assert len(run.collector.answers[request.id].tokens) == request.max_tokens
        assert masked[request.id] == (request.max_tokens if request.grammar else 0)


def test_side_by_side_streams_pause_less_than_in_time_slices() -> None:
    """The paper's first figure in one line: prompts do not stop the running streams."""
    specs = ("static_split:decode_fraction=0.5", "chunked_prefill", "time_sliced")
    runs = {
        name: summarise(list(run_arm(h200(0.0), name, REQUESTS, 6.0, 0).collector.answers.values())) for name in specs
    }
    split, chunked, sliced = (runs[name].longest_gap_s for name in specs)
    assert split < chunked / 2
    assert chunked < sliced


def test_a_run_ends_with_the_last_request_that_is_waited_for() -> None:
    whole = run_arm(h200(), "time_sliced", REQUESTS, 6.0, 0)
    part = run_arm(h200(), "time_sliced", REQUESTS, 6.0, 0, last=10)
    assert part.executor.now_s() < whole.executor.now_s()
    for number in range(11):
        assert part.collector.answers[number] == whole.collector.answers[number]


def test_scored_answers_are_those_of_the_definition() -> None:
    many = lognormal_requests(240, seed=1, prompt_median=100, output_median=4)
    answers = scored_answers(h200(), "time_sliced", many, 20.0, 1)
    assert len(answers) == 160
    assert answers[0].arrival_s == arrivals(many, 20.0, 1)[40].arrival_s
    assert arrivals(many, 20.0, 0) == at_rate(many, 20.0) != arrivals(many, 20.0, 1)


def test_policies_that_ignore_targets_serve_alike_whatever_they_are() -> None:
    tight = Slo("tight", 0.01, 0.001)
    for name in ("time_sliced", "chunked_prefill:budget=512", "static_split"):
        assert ignores_targets(make_policy(name))
        one, other = (run_arm(h200(), name, REQUESTS, 12.0, 0, slo).collector.answers for slo in (CHAT, tight))
        assert one == other == run_arm(h200(), name, REQUESTS, 12.0, 0, forecasts=False).collector.answers
    assert not ignores_targets(make_policy("time_sliced:ordering=slack"))
    assert not ignores_targets(make_policy("time_sliced:admission=timely"))


def test_a_policy_that_starts_nothing_is_an_error_not_a_hang() -> None:
    setup = h200()
    simulation = prepare(setup.limits, Idle(), setup.truth(0))
    submit(simulation, [Request(0, range(10), 5, 0.0)])
    with pytest.raises(PolicyError, match="1 requests are left, but the policy idle starts nothing"):
        drain(simulation)


def test_nor_is_one_that_lets_the_first_wait_for_the_last() -> None:
    """Half a minute on an idle device, though more requests are to come."""
    setup = h200()
    simulation = prepare(setup.limits, Idle(), setup.truth(0))
    submit(simulation, [Request(number, range(10), 5, 10.0 * number) for number in range(100)])
    with pytest.raises(PolicyError, match=r"nothing for 30 s .*, though nothing runs and 4 requests wait"):
        drain(simulation)


@pytest.mark.parametrize("total", [132, 148, 114, 108])
def test_the_simulated_engine_has_the_shares_of_a_real_one(total: int) -> None:
    assert tuple(split.decode_sms for split in usual_splits(total)) == usual_shares(SmPool(total, 8, 8))
    assert all(split.prefill_sms + split.decode_sms == total for split in usual_splits(total))


def test_a_device_of_a_few_threads_has_splits_too() -> None:
    assert [(split.prefill_sms, split.decode_sms) for split in usual_splits(2)] == [(1, 1)]
    assert usual_splits(1) == ()


def test_limits_come_from_the_calibration() -> None:
    setup = h200()
    limits = limits_of(setup.estimator, cache_tokens=1600, max_seqs=8, decode_shares=(32, 16))
    assert (limits.total_blocks, limits.max_seqs, limits.batch_tokens) == (100, 8, 2112)
    assert sorted(limits.lattice.decode_shares) == [16, 32, 132]
    assert 5_000 < limits.group_token_layers < 20_000
    with pytest.raises(ConfigError, match="between 1 and 131"):
        limits_of(setup.estimator, decode_shares=(132,))
    with pytest.raises(ConfigError, match="a cache of at least 16 tokens"):
        limits_of(setup.estimator, cache_tokens=8)


def test_a_search_begins_at_half_of_what_the_device_can_prefill() -> None:
    setup = h200()
    short, long = ([RequestLengths(float(i), tokens, 10) for i in range(4)] for tokens in (1000, 2000))
    assert setup.first_rate(short) == pytest.approx(2 * setup.first_rate(long))
    assert 10 < setup.first_rate(short) < 40


@pytest.mark.parametrize("name", POLICIES)
def test_the_scheduler_makes_no_garbage_that_only_the_collector_finds(name: str) -> None:
    """An engine process never looks for such garbage while it has work (`core/garbage`)."""
    run_arm(h200(), name, REQUESTS, 6.0, 1, CHAT)  # what is made once: caches of methods, of patterns
    gc.collect()
    gc.disable()
    try:
        run = run_arm(h200(), name, REQUESTS, 6.0, 2, CHAT)
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert len(run.collector.answers) == len(REQUESTS)
