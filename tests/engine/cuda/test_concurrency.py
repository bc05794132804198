"""Both lanes of the GPU engine under the real loop and policies: whatever runs beside what, no answer changes."""

import random
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("triton")

from bulletserve.core.launch import Launch
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import Lane
from bulletserve.core.prefix import block_hashes
from bulletserve.core.request import FinishReason, Request
from bulletserve.core.snapshot import Limits
from bulletserve.scheduler.inbox import QueueInbox
from tests.engine.cuda.counting_model import BLOCK_SIZE, LAYERS, VOCABULARY, counting_executor, later, next_token
from tests.engine.small_engine import SmallEngine

LATTICE = Lattice.of_splits(132, (Partition(100, 32), Partition(116, 16)))
POLICIES = (
    "time_sliced",
    "chunked_prefill:budget=11",
    "chunked_prefill:budget=40",
    "static_split:decode_fraction=0.1",
    "static_split:decode_fraction=0.3,alone=share,batch_tokens=9",
    "random",
)


@contextmanager
def engine(monkeypatch, blocks: int = 200, seqs: int = 8, lattice: Lattice = LATTICE):
    inbox = QueueInbox()
    executor, streams = counting_executor(monkeypatch, lattice, blocks, seqs, inbox)
    limits = Limits(LAYERS, BLOCK_SIZE, blocks, seqs, 40, 24, lattice, 8)
    yield SmallEngine(None, inbox, executor, limits)  # type: ignore[arg-type]
    executor.close()
    for stream in streams:
        stream.end()


def make_requests(count: int, seed: int, spread_s: float = 0.1) -> list[Request]:
    rng = random.Random(seed)
    common = [rng.randrange(VOCABULARY) for _ in range(30)]
    requests = []
    for number in range(count):
        prompt = common[: rng.choice([0, 0, 13, 30])] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))]
        stops = frozenset(rng.sample(range(VOCABULARY), 3))
        requests.append(
            Request(
                number, prompt, rng.choice([1, 2, 9, 25, 60]), rng.random() * spread_s, stop_ids=stops,
                block_hashes=block_hashes(prompt, BLOCK_SIZE),
            )
        )  # fmt: skip
    return requests


def expected(request: Request) -> list[int]:
    tokens = list(request.prompt_ids)
    while len(tokens) < len(request.prompt_ids) + request.max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_ids:
            break
    return tokens[len(request.prompt_ids) :]


def slow(seed: int, lanes: tuple[Lane, ...]):
    """Delays of launches and, in the step's stream, of what they launched."""
    rng = random.Random(seed)

    def delay(launch: Launch) -> None:
        if launch.lane in lanes:
            if rng.random() < 0.2:
                time.sleep(rng.random() * 2e-3)
            if rng.random() < 0.4:
                device_s = rng.random() * 4e-3
                later(lambda: time.sleep(device_s))

    return delay


def check(requests, collector) -> None:
    for request in requests:
        assert collector.answers[request.id].tokens == expected(request), f"request {request.id}"


@pytest.mark.parametrize("lanes", [(), (Lane.PREFILL,), (Lane.DECODE,), tuple(Lane)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_delays_change_no_token(monkeypatch, policy, lanes):
    requests = make_requests(40, seed=3)
    with engine(monkeypatch) as small:
        collector, _ = small.serve(requests, policy, delay=slow(5, lanes))
    check(requests, collector)


@pytest.mark.parametrize("policy", POLICIES)
def test_preemption_seats_taken_again_and_several_loops_change_no_token(monkeypatch, policy):
    with engine(monkeypatch, blocks=34) as small:
        preemptions = 0
        for seed in range(3):
            requests = make_requests(24, seed, spread_s=0.01)
            collector, loop = small.serve(requests, policy, delay=slow(seed, tuple(Lane)))
            check(requests, collector)
            preemptions += loop.state.preemptions
    assert preemptions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("policy", POLICIES)
def test_where_both_lanes_share_all_sms_no_token_changes(monkeypatch, policy):
    requests = make_requests(40, seed=4)
    with engine(monkeypatch, lattice=Lattice.of_splits(132, (Partition(132, 132),))) as small:
        collector, _ = small.serve(requests, policy, delay=slow(5, tuple(Lane)))
    check(requests, collector)


def test_one_seat_is_enough(monkeypatch):
    requests = make_requests(6, seed=8)
    with engine(monkeypatch, seqs=1) as small:
        for policy in POLICIES:
            collector, _ = small.serve(requests, policy)
            check(requests, collector)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_failing_steps_end_their_requests_and_change_no_other(monkeypatch, policy, seed):
    requests = make_requests(40, seed=20 + seed)
    rng = random.Random(seed)
    stay = slow(seed, tuple(Lane))

    def fail(launch: Launch) -> None:
        stay(launch)
        if rng.random() < 0.04:
            raise ValueError("injected")

    with engine(monkeypatch, blocks=40) as small:
        collector, _ = small.serve(requests, policy, delay=fail)
    broken = [r for r in requests if collector.answers[r.id].finish is FinishReason.ERROR]
    assert broken and len(broken) < len(requests)
    for request in broken:
        message = collector.messages[request.id]
        assert "injected" in message or "layer group" in message
    for request in requests:
        tokens, right = collector.answers[request.id].tokens, expected(request)
        assert tokens == (right[: len(tokens)] if request in broken else right), f"request {request.id}"
