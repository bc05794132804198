"""The engine on a GPU: concurrency, delays, reused memory and captured graphs change nothing but time."""

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from bulletserve.core.launch import Launch
from bulletserve.core.plan import Lane
from bulletserve.core.token_rules import TokenRules
from bulletserve.telemetry.collector import Collector
from tests.engine import small_engine
from tests.gpu.gpu_engine import check_answers, gpu_engine, gpu_requests, random_delays

pytestmark = pytest.mark.gpu

POLICIES = (
    "time_sliced",
    "chunked_prefill:budget=96",
    "chunked_prefill:budget=900",
    "static_split:decode_fraction=0.12",
    "static_split:decode_fraction=0.4,alone=share",
    "random",
)


@pytest.fixture(scope="module")
def engine():
    with gpu_engine() as (engine, _):
        yield engine


@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_is_the_one_its_prefix_calls_for(engine, policy):
    requests = gpu_requests(60, seed=3)
    collector, _ = engine.serve(requests, policy)
    check_answers(requests, collector)


@pytest.mark.parametrize("lanes", [(Lane.PREFILL,), (Lane.DECODE,), tuple(Lane)], ids=str)
@pytest.mark.parametrize("policy", ["static_split:decode_fraction=0.12", "chunked_prefill:budget=300"])
def test_delays_in_either_stream_change_no_token(engine, policy, lanes):
    requests = gpu_requests(60, seed=4)
    collector, _ = engine.serve(requests, policy, delay=random_delays(5, lanes))
    check_answers(requests, collector)


def test_thousands_of_hand_overs(engine):
    requests = gpu_requests(1500, seed=6, spread_s=4.0, longest=400)
    collector, _ = engine.serve(requests, "static_split:decode_fraction=0.12")
    check_answers(requests, collector)


def test_a_warm_prefix_cache_changes_no_token(engine):
    requests = gpu_requests(40, seed=8)
    cold, loop = engine.serve(requests, "static_split")
    warm, _ = engine.serve(requests, "static_split", loop=loop)
    check_answers(requests, cold)
    check_answers(requests, warm)
    assert sum(answer.cached_tokens for answer in warm.answers.values()) > 1000


def test_garbage_in_freed_blocks_changes_no_token(engine):
    for layer in engine.executor.cache.layers:
        layer.fill_(float("nan"))
    torch.cuda.synchronize()
    requests = gpu_requests(60, seed=9)
    for policy in POLICIES:
        collector, _ = engine.serve(requests, policy)
        check_answers(requests, collector)


def test_preemption_changes_no_token():
    with gpu_engine(total_blocks=48) as (small, _):
        short = gpu_requests(40, seed=10, longest=300, spread_s=0.01)
        requests = [replace(request, max_tokens=150) for request in short]
        collector, loop = small.serve(requests, "static_split")
        check_answers(requests, collector)
        assert loop.state.preemptions > 0


def with_rules(requests):
    """Every third request has rules: of all kinds, one with each."""
    kinds = [
        TokenRules(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5, logprobs=20),
        TokenRules(bad_words=((1, 2), (3,)), min_p=0.1, bias=((5, 3.0),)),
        TokenRules(end_ids=(7,), min_tokens=5, prompt_logprobs=3),
        TokenRules(allowed_ids=tuple(range(10, 60)), logprobs=0),
    ]
    return [
        replace(request, rules=kinds[n // 3 % len(kinds)], block_hashes=()) if n % 3 == 0 else request
        for n, request in enumerate(requests)
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_rules_of_some_rows_change_no_others(engine, policy):
    requests = with_rules(gpu_requests(60, seed=14))
    told = {}

    class Heard(Collector):
        def emit(self, output):
            super().emit(output)
            for request_id, one in output.logprobs:
                told.setdefault(request_id, []).append(one)

    monkey = pytest.MonkeyPatch()
    monkey.setattr(small_engine, "Collector", Heard)
    try:
        collector, _ = engine.serve(requests, policy)
    finally:
        monkey.undo()
    check_answers([request for request in requests if request.rules is None], collector)
    for request in requests:
        rules, tokens = request.rules, collector.answers[request.id].tokens
        if rules is not None:
            assert not rules.allowed_ids or set(tokens) <= set(rules.allowed_ids)
            assert 3 not in tokens or not rules.bad_words
            assert len(told.get(request.id, [])) == (0 if rules.logprobs is None else len(tokens))
            if rules.logprobs and request.temperature == 0:
                assert [one.top_ids[0] for one in told[request.id]] == tokens


def test_a_failing_step_ends_its_requests_and_no_others(engine):
    requests = gpu_requests(40, seed=12)
    failed = []

    def fail(launch: Launch) -> None:
        if launch.step_id % 23 == 7:
            failed.append(launch.step_id)
            raise ValueError("injected")

    collector, _ = engine.serve(requests, "static_split:decode_fraction=0.12", delay=fail)
    assert failed
    whole = [r for r in requests if len(collector.answers[r.id].tokens) == r.max_tokens]
    broken = [r for r in requests if r not in whole]
    assert whole and broken
    assert all("injected" in collector.messages[r.id] for r in broken)
    check_answers(whole, collector)


def test_nothing_compiles_or_captures_under_traffic(engine, monkeypatch):
    import triton

    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *a, **k: compiled.append(k.get("repr")))
    captured = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda *a, **k: captured.append(a))
    for policy in POLICIES:
        requests = with_rules(gpu_requests(60, seed=13, longest=3000))
        collector, _ = engine.serve(requests, policy)
        assert all(answer.tokens for answer in collector.answers.values())
    assert not compiled
    assert not captured
