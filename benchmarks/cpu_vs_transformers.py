"""The decoder against transformers' LlamaForCausalLM on this CPU: SmolLM2-135M, same weights, dtype and threads.

    python benchmarks/cpu_vs_transformers.py [--threads 2] [--repeats 25] [--dtypes bfloat16 float32]

Measured by turns in one process: a prefill of 512 tokens (logits of its last), and decode steps of 1, 4 and 16
sequences at a context of 160 tokens (logits of each row). Transformers runs sdpa over a DynamicCache that holds
the context before each step; ours reads a paged cache whose blocks are scattered at random. Reported are
medians, and the median of the ratios of neighbouring runs (above 1: ours is faster), which a change of the
machine's load between two turns disturbs least.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from bulletserve.core.shapes import ModelShape
from bulletserve.engine.kv_cache import KvCache
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.models.context import DecodeSegment, PrefillSegment, StepContext
from bulletserve.models.decoder import Decoder
from bulletserve.models.weights import load_state
from record import record

PREFILL_TOKENS = 512
CONTEXT_TOKENS = 160
BATCHES = (1, 4, 16)
BLOCK_SIZE = 16
NUM_BLOCKS = 320


def transformers_model(shape: ModelShape, state: dict[str, Tensor], dtype: torch.dtype) -> LlamaForCausalLM:
    """Transformers' own model with the weights of `state`, which it shares."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_context,
        rms_norm_eps=shape.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    return model


class Ours:
    """Our decoder and a cache of scattered blocks."""

    def __init__(self, shape: ModelShape, state: dict[str, Tensor], dtype: torch.dtype) -> None:
        self._decoder = Decoder(shape, state, dtype)
        self._layers = shape.num_layers
        self._cache = KvCache(shape, NUM_BLOCKS, BLOCK_SIZE, dtype, torch.device("cpu"))

    def _step(self, ids: Tensor, context: StepContext, rows: int) -> Tensor:
        hidden = self._decoder.run_layers(self._decoder.embed(ids), 0, self._layers, context, self._cache)
        return self._decoder.logits(hidden[-rows:])

    def prefill(self, ids: Tensor) -> Callable[[], object]:
        table = torch.randperm(NUM_BLOCKS)[: -(-len(ids) // BLOCK_SIZE)]
        positions = torch.arange(len(ids))
        segment = PrefillSegment(0, len(ids), table, len(ids))
        context = StepContext(positions, _slots(table, positions), (segment,))
        return lambda: self._step(ids, context, 1)

    def decode(self, batch: int, ids: Tensor) -> Callable[[], object]:
        blocks = -(-CONTEXT_TOKENS // BLOCK_SIZE)
        tables = torch.randperm(NUM_BLOCKS)[: batch * blocks].view(batch, blocks)
        positions = torch.full((batch,), CONTEXT_TOKENS - 1)
        slots = torch.stack([_slots(t, p) for t, p in zip(tables, positions, strict=True)])
        rows = DecodeSegment(0, batch, tables, positions + 1, CONTEXT_TOKENS)
        context = StepContext(positions, slots, (), rows)
        return lambda: self._step(ids, context, batch)


class Theirs:
    """Transformers' forward with its own cache."""

    def __init__(self, shape: ModelShape, state: dict[str, Tensor], dtype: torch.dtype) -> None:
        self._model = transformers_model(shape, state, dtype)

    def prefill(self, ids: Tensor) -> Callable[[], object]:
        return lambda: self._model(input_ids=ids[None], use_cache=True, logits_to_keep=1).logits

    def decode(self, batch: int, ids: Tensor) -> Callable[[], object]:
        cache = DynamicCache(config=self._model.config)
        context = torch.randint(0, self._model.config.vocab_size, (batch, CONTEXT_TOKENS - 1))
        self._model(input_ids=context, cache=cache, use_cache=True, logits_to_keep=1)
        filled = [(layer.keys, layer.values) for layer in cache.layers]

        def step() -> Tensor:
            # A step appends to the cache; put the context back by reference, which costs nothing.
            for layer, (keys, values) in zip(cache.layers, filled, strict=True):
                layer.keys, layer.values = keys, values
            logits: Tensor = self._model(input_ids=ids[:, None], cache=cache, use_cache=True).logits
            return logits

        return step


def _slots(table: Tensor, positions: Tensor) -> Tensor:
    return table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


def by_turns(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> list[tuple[float, float]]:
    """Milliseconds of both, in pairs of neighbouring runs, after two warm-up rounds."""
    pairs = []
    for turn in range(repeats + 2):
        times = []
        for run in (ours, theirs):
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
        if turn >= 2:
            pairs.append((times[0], times[1]))
    return pairs


@torch.inference_mode()
def measure(dtype_name: str, repeats: int) -> dict[str, float]:
    """All cases in one dtype, as flat metrics; prints a row for each."""
    dtype = getattr(torch, dtype_name)
    checkpoint = open_checkpoint(None)
    state = load_state(checkpoint, dtype, "cpu")
    ours, theirs = Ours(checkpoint.shape, state, dtype), Theirs(checkpoint.shape, state, dtype)
    vocabulary = checkpoint.shape.vocab_size
    prompt = torch.randint(0, vocabulary, (PREFILL_TOKENS,))
    cases = [(f"prefill_{PREFILL_TOKENS}", ours.prefill(prompt), theirs.prefill(prompt), max(3, repeats // 3))]
    for batch in BATCHES:
        ids = torch.randint(0, vocabulary, (batch,))
        cases.append(
            (f"decode_b{batch}_c{CONTEXT_TOKENS}", ours.decode(batch, ids), theirs.decode(batch, ids), repeats)
        )
    metrics: dict[str, float] = {}
    for case, our_step, their_step, turns in cases:
        pairs = by_turns(our_step, their_step, turns)
        mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{dtype_name:9} {case:14} {mine:9.2f} {other:13.2f} {ratio:7.2f}", flush=True)
        key = f"{case}_{dtype_name}"
        metrics |= {f"{key}_ms": mine, f"{key}_transformers_ms": other, f"{key}_x": ratio}
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{'dtype':9} {'case':14} {'ours, ms':>9} {'transformers':>13} {'ratio':>7}")
    metrics: dict[str, float] = {}
    for dtype_name in options.dtypes:
        metrics |= measure(dtype_name, options.repeats)
    print("wrote", record(f"cpu_vs_transformers_{options.threads}thr", metrics))


if __name__ == "__main__":
    main()
