"""A small random model behind the real lanes, and the plain way to get its tokens: one request at a time."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch

from bulletserve.core.events import Arrived
from bulletserve.core.launch import Launch
from bulletserve.core.prefix import block_hashes
from bulletserve.core.request import Request
from bulletserve.core.shapes import ModelShape
from bulletserve.core.snapshot import Limits
from bulletserve.engine.cache_size import CacheSize
from bulletserve.engine.executor import CpuExecutor
from bulletserve.engine.kv_cache import KvCache
from bulletserve.engine.load import load_cpu_executor
from bulletserve.kernels.sampling import SamplingRows, sample
from bulletserve.models.context import PrefillSegment, StepContext
from bulletserve.models.decoder import Decoder
from bulletserve.models.weights import dummy_state
from bulletserve.scheduler.inbox import MonotonicClock, QueueInbox
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.loop import Loop
from bulletserve.scheduler.policies import make_policy
from bulletserve.scheduler.policy import Policy
from bulletserve.scheduler.state import State
from bulletserve.telemetry.collector import Collector
from tests.scheduler.random_policy import RandomPolicy

SHAPE = ModelShape("llama", 4, 32, 64, 4, 2, 8, 211, 512, tied_embeddings=True)
BLOCK_SIZE = 4


@cache
def small_model() -> Decoder:
    """In float64, so that the order of additions in a batch never decides between two tokens."""
    return Decoder(SHAPE, dummy_state(SHAPE, torch.float64, "cpu", seed=3), torch.float64)


@dataclass
class SmallEngine:
    model: Decoder
    inbox: QueueInbox
    executor: CpuExecutor
    limits: Limits

    def serve(
        self,
        requests: Sequence[Request],
        policy: str,
        *,
        caching: bool = True,
        delay: Callable[[Launch], None] | None = None,
        loop: Loop | None = None,
    ) -> tuple[Collector, Loop]:
        """Serve requests that arrive at their times; returns when all is done and checks the ledger."""
        collector = Collector()
        if loop is None:
            ledger = KvLedger(self.limits.total_blocks + 1, self.limits.block_size, caching)
            state = State(self.limits, ledger)
            loop = Loop(state, policy_of(policy), self.executor, self.inbox, MonotonicClock(), collector)
        loop._outlet = collector
        self.executor.before_step = delay
        now_s = time.monotonic()
        timed = [replace(request, arrival_s=now_s + request.arrival_s) for request in requests]
        for request in timed:
            collector.expect(request)

        def feed() -> None:
            for request in timed:
                time.sleep(max(0.0, request.arrival_s - time.monotonic()))
                self.inbox.post(Arrived(request))

        feeder = threading.Thread(target=feed)
        feeder.start()
        deadline_s = time.monotonic() + 60
        while (collector.open or not loop.state.is_idle) and time.monotonic() < deadline_s:
            loop.turn()
            loop.state.ledger.check_integrity()
        feeder.join()
        assert loop.state.is_idle and not collector.open, "requests are left"
        assert loop.state.ledger.used_blocks == 0
        return collector, loop


def policy_of(spec: str) -> Policy:
    """`random` does anything that a plan may do, for thousands of decisions."""
    return RandomPolicy(0, 5000) if spec == "random" else make_policy(spec)


@contextmanager
def small_engine(total_blocks: int = 200, max_seqs: int = 8) -> Iterator[SmallEngine]:
    model = small_model()
    inbox = QueueInbox()
    size = CacheSize(total_blocks, min(SHAPE.max_context, total_blocks * BLOCK_SIZE), max_seqs)
    executor = load_cpu_executor(model, size, BLOCK_SIZE, inbox, cores=2)
    limits = Limits(SHAPE.num_layers, BLOCK_SIZE, total_blocks, max_seqs, 40, 24, executor.lattice)
    try:
        yield SmallEngine(model, inbox, executor, limits)
    finally:
        executor.close()


def random_requests(count: int, seed: int, *, sampled: bool = True, spread_s: float = 0.05) -> list[Request]:
    """Requests of mixed length, some with a common beginning, greedy and sampled ones side by side."""
    rng = random.Random(seed)
    common = [rng.randrange(SHAPE.vocab_size) for _ in range(30)]
    requests = []
    for number in range(count):
        own = [rng.randrange(SHAPE.vocab_size) for _ in range(rng.randint(1, 40))]
        prompt = common[: rng.choice([0, 0, 13, 30])] + own
        requests.append(
            Request(
                number,
                prompt,
                rng.choice([1, 2, 9, 25]),
                arrival_s=rng.random() * spread_s,
                temperature=rng.choice([0.0, 0.0, 0.8]) if sampled else 0.0,
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 20]),
                seed=rng.getrandbits(60),
                stop_ids=frozenset(rng.sample(range(SHAPE.vocab_size), 4)),
                block_hashes=block_hashes(prompt, BLOCK_SIZE),
            )
        )
    return sorted(requests, key=lambda request: request.arrival_s)


_expected: dict[tuple[object, ...], list[int]] = {}


def serial_tokens(request: Request) -> list[int]:
    """The request's tokens, each by a forward over the whole sequence from an empty cache."""
    sampling = (request.temperature, request.top_p, request.top_k, request.seed, request.stop_ids)
    key = (tuple(request.prompt_ids), request.max_tokens, *sampling)
    if key not in _expected:
        _expected[key] = _serial_tokens(small_model(), request)
    return _expected[key]


def _serial_tokens(model: Decoder, request: Request) -> list[int]:
    tokens = list(request.prompt_ids)
    generated: list[int] = []
    while len(generated) < request.max_tokens:
        count = len(tokens)
        blocks = -(-count // BLOCK_SIZE)
        cache = KvCache(SHAPE, blocks + 1, BLOCK_SIZE, model.dtype, torch.device("cpu"))
        table = torch.arange(1, blocks + 1)
        position = torch.arange(count)
        slots = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        context = StepContext(position, slots, (PrefillSegment(0, count, table, count),))
        with torch.inference_mode():
            hidden = model.run_layers(model.embed(torch.tensor(tokens)), 0, SHAPE.num_layers, context, cache)
            rows = SamplingRows(
                torch.tensor([request.temperature], dtype=torch.float32),
                torch.tensor([request.top_p], dtype=torch.float32),
                torch.tensor([request.top_k]),
                torch.tensor([request.seed]),
                torch.tensor([count]),
            )
            token = int(sample(model.logits(hidden[-1:]), rows))
        tokens.append(token)
        generated.append(token)
        if token in request.stop_ids:
            break
    return generated
