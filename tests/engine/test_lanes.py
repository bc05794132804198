"""The lanes change nothing but time: the same tokens come out whatever runs beside what, and when."""

import random
import threading
import time

import pytest

from bulletserve.core.launch import Launch
from bulletserve.core.plan import Lane
from bulletserve.core.request import FinishReason
from tests.engine.small_engine import random_requests, serial_tokens, small_engine

POLICIES = (
    "time_sliced",
    "chunked_prefill",
    "chunked_prefill:budget=7",
    "static_split",
    "static_split:alone=share,batch_tokens=9",
    "random",
)


def random_delays(seed: int, lanes: tuple[Lane, ...]):
    rng = random.Random(seed)

    def delay(launch: Launch) -> None:
        if launch.lane in lanes and rng.random() < 0.4:
            time.sleep(rng.random() * 0.006)

    return delay


def check(requests, collector) -> None:
    for request in requests:
        answer = collector.answers[request.id]
        assert answer.tokens == serial_tokens(request), f"request {request.id}"
        stopped = answer.tokens[-1] in request.stop_ids
        assert answer.finish == (FinishReason.STOP if stopped else FinishReason.LENGTH)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lanes", [(), (Lane.PREFILL,), (Lane.DECODE,), tuple(Lane)], ids=str)
def test_tokens_equal_serial_ones_under_delays(policy, lanes):
    requests = random_requests(14, seed=7)
    with small_engine() as engine:
        collector, _ = engine.serve(requests, policy, delay=random_delays(5, lanes))
        check(requests, collector)


@pytest.mark.parametrize("policy", POLICIES)
def test_preemption_and_recomputation_change_no_token(policy):
    requests = random_requests(16, seed=11, spread_s=0.01)
    with small_engine(total_blocks=26) as engine:
        collector, loop = engine.serve(requests, policy)
        check(requests, collector)
        assert loop.state.preemptions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("policy", ["time_sliced", "chunked_prefill", "static_split"])
def test_a_warm_prefix_cache_changes_no_token(policy):
    requests = random_requests(14, seed=7)
    with small_engine() as engine:
        cold, loop = engine.serve(requests, policy)
        warm, _ = engine.serve(requests, policy, loop=loop)
        off, _ = engine.serve(requests, policy, caching=False)
        check(requests, cold)
        assert [warm.answers[r.id].tokens for r in requests] == [cold.answers[r.id].tokens for r in requests]
        assert [off.answers[r.id].tokens for r in requests] == [cold.answers[r.id].tokens for r in requests]
        assert sum(answer.cached_tokens for answer in warm.answers.values()) > 100
        assert all(answer.cached_tokens == 0 for answer in off.answers.values())
        assert all(a.cached_tokens < a.prompt_tokens for a in warm.answers.values())


def test_another_salt_finds_no_prefix():
    requests = random_requests(4, seed=9)
    with small_engine() as engine:
        _, loop = engine.serve(requests, "static_split")
        hits = loop.state.prefixes.hit_tokens
        for_other = [
            type(r)(
                **{name: getattr(r, name) for name in r.__dataclass_fields__} | {"block_hashes": (), "cache_salt": "b"}
            )
            for r in requests[:1]
        ]
        engine.serve(for_other, "static_split", loop=loop)
        assert loop.state.prefixes.hit_tokens == hits


def test_both_lanes_really_run_at_once():
    """A prefill group waits inside its step until a decode step has run beside it: only possible side by side."""
    decoded = threading.Event()
    decoding = threading.Event()
    met: list[bool] = []

    def meet(launch: Launch) -> None:
        if launch.lane is Lane.DECODE:
            decoding.set()
            decoded.set()
        elif decoding.is_set():
            decoded.clear()
            met.append(decoded.wait(timeout=10))

    first, second = random_requests(2, seed=1, sampled=False)
    long_answer = type(first)(0, first.prompt_ids, 400, 0.0)
    long_prompt = type(first)(1, list(range(1, 90)), 2, 0.1)
    with small_engine() as engine:
        collector, loop = engine.serve([long_answer, long_prompt], "static_split", delay=meet)
    assert met and all(met)
    assert loop.state.lanes.both_busy_s > 0
    del second, collector


def test_a_failing_step_ends_its_requests_only():
    requests = random_requests(12, seed=21, sampled=False, spread_s=0.2)
    failed: set[int] = set()
    rng = random.Random(2)
    seats: dict[int, int] = {}

    def fail_sometimes(launch: Launch) -> None:
        seats.update({seat.seat: seat.request_id for seat in launch.seats})
        touched = {seats[part.seat] for part in launch.parts} | {seats[row] for row in launch.rows}
        if rng.random() < 0.05:
            failed.update(touched)
            raise RuntimeError("injected")

    with small_engine() as engine:
        collector, _ = engine.serve(requests, "static_split", delay=fail_sometimes)
        assert failed
        for request in requests:
            answer = collector.answers[request.id]
            expected = serial_tokens(request)
            if answer.finish == FinishReason.ERROR:
                assert request.id in failed
                assert "injected" in collector.messages[request.id] or "layer group" in collector.messages[request.id]
                assert answer.tokens == expected[: len(answer.tokens)]
            else:
                assert answer.tokens == expected
