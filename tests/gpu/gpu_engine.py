"""A small random model on the GPU behind the real loop, and what its answers are checked against.

In bf16 two forwards of different batch size may differ in the last bits, so answers are not compared token by token:
every token must be (nearly) the best by a float32 forward over exactly the tokens before it.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from bulletserve.core.config import EngineConfig
from bulletserve.core.launch import Launch
from bulletserve.core.plan import Lane
from bulletserve.core.prefix import block_hashes
from bulletserve.core.request import Request
from bulletserve.core.shapes import ModelShape
from bulletserve.core.snapshot import Limits
from bulletserve.engine.cuda.load import load_cuda_engine
from bulletserve.engine.kv_cache import KvCache
from bulletserve.engine.loaded import LoadedEngine
from bulletserve.formats.description import Checkpoint
from bulletserve.models.context import PrefillSegment, StepContext
from bulletserve.models.decoder import Decoder
from bulletserve.models.weights import dummy_state
from bulletserve.scheduler.inbox import QueueInbox
from bulletserve.telemetry.collector import Collector
from tests.engine.small_engine import SmallEngine

SHAPE = ModelShape("llama", 4, 512, 1024, 4, 2, 128, 1000, 4096)
SEED = 5
BLOCK_SIZE = 16
NEAR_TIE = 0.12  # logits have a spread of about one; bf16 leaves errors of about 0.02


@cache
def reference_model() -> Decoder:
    """The same weights, rounded to bf16 as the engine's are, in float32 on the GPU by plain torch."""
    state = {n: t.float() for n, t in dummy_state(SHAPE, torch.bfloat16, "cuda", SEED).items()}
    return Decoder(SHAPE, state, torch.float32)


@torch.inference_mode()
def reference_logits(tokens: Sequence[int]) -> Tensor:
    """Float32 logits [len(tokens), V] after each token."""
    model, count = reference_model(), len(tokens)
    device = torch.device("cuda")
    blocks = -(-count // BLOCK_SIZE)
    cache = KvCache(SHAPE, blocks, BLOCK_SIZE, torch.float32, device)
    position = torch.arange(count, device=device)
    context = StepContext(position, position, (PrefillSegment(0, count, torch.arange(blocks, device=device), count),))
    hidden = model.run_layers(model.embed(torch.tensor(tokens, device=device)), 0, SHAPE.num_layers, context, cache)
    return model.logits(hidden)


@contextmanager
def gpu_engine(
    total_blocks: int = 1500, max_seqs: int = 24, group_token_layers: int = 700, batch_tokens: int = 600
) -> Iterator[tuple[SmallEngine, LoadedEngine]]:
    """Small layer groups, so that batches are cut often."""
    inbox = QueueInbox()
    config = EngineConfig(
        device="cuda",
        load_format="dummy",
        max_num_seqs=max_seqs,
        num_gpu_blocks_override=total_blocks,
        seed=SEED,
        block_size=BLOCK_SIZE,
        decode_shares=(16, 48),
    )
    loaded = load_cuda_engine(config, Checkpoint("small", SHAPE, "bfloat16"), inbox)
    limits = Limits(
        SHAPE.num_layers,
        BLOCK_SIZE,
        loaded.size.total_blocks,
        max_seqs,
        group_token_layers,
        batch_tokens,
        loaded.executor.lattice,
    )
    try:
        yield SmallEngine(reference_model(), inbox, loaded.executor, limits), loaded  # type: ignore[arg-type]
    finally:
        loaded.executor.close()


def gpu_requests(count: int, seed: int, *, spread_s: float = 0.1, longest: int = 1500, sampled: bool = True):
    """Requests of mixed length, some with a common beginning, greedy and sampled ones side by side."""
    rng = random.Random(seed)
    common = [rng.randrange(SHAPE.vocab_size) for _ in range(200)]
    requests = []
    for number in range(count):
        length = rng.choice([rng.randint(1, 40), rng.randint(1, 300), rng.randint(1, longest)])
        prompt = common[: rng.choice([0, 0, 77, 200])] + [rng.randrange(SHAPE.vocab_size) for _ in range(length)]
        requests.append(
            Request(
                number,
                prompt,
                rng.choice([1, 2, 20, 60]),
                arrival_s=rng.random() * spread_s,
                temperature=rng.choice([0.0, 0.0, 0.8]) if sampled else 0.0,
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 20]),
                seed=rng.getrandbits(60),
                block_hashes=block_hashes(prompt, BLOCK_SIZE),
            )
        )
    return sorted(requests, key=lambda request: request.arrival_s)


def check_answers(requests: Sequence[Request], collector: Collector) -> float:
    """Every greedy token is nearly the best one, every sampled one nearly in its top-k set; the worst miss."""
    worst = 0.0
    for request in requests:
        answer = collector.answers[request.id]
        assert len(answer.tokens) == request.max_tokens, f"request {request.id}: {answer}"
        tokens = list(request.prompt_ids) + answer.tokens
        logits = reference_logits(tokens)[len(request.prompt_ids) - 1 : -1]
        own = logits.gather(1, torch.tensor(answer.tokens, device="cuda").unsqueeze(1)).squeeze(1)
        kept = 1 if request.temperature == 0 else request.top_k or SHAPE.vocab_size
        miss = float((logits.topk(kept, dim=1).values[:, -1] - own).max())
        assert miss < NEAR_TIE, f"request {request.id} chose a token {miss:.2f} below what it may choose"
        worst = max(worst, miss)
    return worst


def random_delays(seed: int, lanes: tuple[Lane, ...]):
    """Sleeps on the device, in the stream of the step, before steps of some lanes."""
    rng = random.Random(seed)

    def delay(launch: Launch) -> None:
        if launch.lane in lanes and rng.random() < 0.3:
            torch.cuda._sleep(int(rng.random() * 4e6))  # up to 2 ms

    return delay
