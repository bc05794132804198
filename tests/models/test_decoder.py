"""The decoder against transformers: same numbers, however a step is cut, placed or accompanied."""

import random
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bulletserve.core.errors import BrokenCheckpoint, UnsupportedModel
from bulletserve.core.shapes import ModelShape, RopeScaling
from bulletserve.engine.kv_cache import KvCache, bytes_per_block
from bulletserve.models.context import DecodeSegment, PrefillSegment, StepContext
from bulletserve.models.decoder import Decoder
from bulletserve.models.rotary import inverse_frequencies

BLOCK = 4
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}


def _llama() -> tuple[PreTrainedModel, dict[str, Any]]:
    config = LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=False)
    return LlamaForCausalLM(config), {"rope_theta": 500.0, "rope_scaling": RopeScaling("llama3", 4.0, 1.0, 4.0, 32)}


def _linear_llama() -> tuple[PreTrainedModel, dict[str, Any]]:
    config = LlamaConfig(**SIZES, rope_parameters=LINEAR, tie_word_embeddings=True)
    return LlamaForCausalLM(config), {
        "rope_theta": 1000.0,
        "rope_scaling": RopeScaling("linear", 2.5),
        "tied_embeddings": True,
    }


def _mistral() -> tuple[PreTrainedModel, dict[str, Any]]:
    config = MistralConfig(**SIZES, sliding_window=7, head_dim=8)
    return MistralForCausalLM(config), {"sliding_window": 7, "rms_eps": 1e-6}


def _qwen2() -> tuple[PreTrainedModel, dict[str, Any]]:
    config = Qwen2Config(**SIZES, tie_word_embeddings=True)
    return Qwen2ForCausalLM(config), {"qkv_bias": True, "tied_embeddings": True, "rms_eps": 1e-6}


def _qwen3() -> tuple[PreTrainedModel, dict[str, Any]]:
    config = Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=False)
    return Qwen3ForCausalLM(config), {"qk_norm": True, "rms_eps": 1e-6, "head_dim": 24}


FAMILIES: dict[str, Callable[[], tuple[PreTrainedModel, dict[str, Any]]]] = {
    "llama3": _llama,
    "linear": _linear_llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


class Served:
    """A decoder with a cache whose blocks are handed out in random order, and the reference it must equal."""

    def __init__(self, family: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.reference, extra = FAMILIES[family]()
        self.reference.eval()
        with torch.no_grad():
            for name, weight in self.reference.named_parameters():
                # Fresh checkpoints have unit norms and zero biases, which would hide a missing one.
                if weight.ndim == 1:
                    weight.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
                else:
                    weight.mul_(4.0)
        self.shape = ModelShape(
            architecture=family,
            num_layers=4,
            hidden_size=48,
            intermediate_size=80,
            num_heads=6,
            num_kv_heads=2,
            vocab_size=211,
            max_context=256,
            **{"head_dim": 8, "rope_theta": _theta(self.reference), "rms_eps": 1e-6} | extra,  # type: ignore[arg-type]
        )
        self.decoder = Decoder(self.shape, self.reference.state_dict(), torch.float32)
        self.cache = KvCache(self.shape, 96, BLOCK, torch.float32, CPU)
        self.free = list(range(96))
        self.random.shuffle(self.free)

    def table(self, tokens: int) -> Tensor:
        return torch.tensor([self.free.pop() for _ in range(-(-tokens // BLOCK))])

    def expected(self, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.reference(input_ids=ids.unsqueeze(0)).logits[0]
        return logits

    def groups(self) -> list[tuple[int, int]]:
        cuts = sorted(self.random.sample(range(1, 4), self.random.randint(0, 3)))
        return list(zip([0, *cuts], [*cuts, 4], strict=True))

    def run(self, ids: Tensor, context: StepContext, groups: list[tuple[int, int]] | None = None) -> Tensor:
        hidden = self.decoder.embed(ids)
        for first, last in groups or [(0, 4)]:
            hidden = self.decoder.run_layers(hidden, first, last, context, self.cache)
        return self.decoder.logits(hidden)


def _theta(model: PreTrainedModel) -> float:
    return float(model.config.rope_parameters["rope_theta"])


def slots_of(table: Tensor, positions: Tensor) -> Tensor:
    return table[positions // BLOCK] * BLOCK + positions % BLOCK


def prefill_context(pieces: list[tuple[Tensor, int, int]]) -> StepContext:
    """Segments of (table, first position, end position)."""
    segments, positions, slots, row = [], [], [], 0
    for table, first, end in pieces:
        segments.append(PrefillSegment(row, row + end - first, table, end))
        positions.append(torch.arange(first, end))
        slots.append(slots_of(table, positions[-1]))
        row += end - first
    return StepContext(torch.cat(positions), torch.cat(slots), tuple(segments))


def with_decode(prefill: StepContext | None, tables: list[Tensor], lengths: list[int]) -> StepContext:
    """Adds one decode row per table; `lengths` count the new token."""
    width = max(len(table) for table in tables)
    padded = torch.stack([torch.cat((t, t.new_zeros(width - len(t)))) for t in tables])
    positions = torch.tensor(lengths) - 1
    slots = torch.stack([slots_of(t, p) for t, p in zip(tables, positions, strict=True)])
    start = 0 if prefill is None else len(prefill.positions)
    decode = DecodeSegment(start, start + len(tables), padded, torch.tensor(lengths), max(lengths))
    if prefill is None:
        return StepContext(positions, slots, (), decode)
    return StepContext(
        torch.cat((prefill.positions, positions)), torch.cat((prefill.kv_slots, slots)), prefill.prefill, decode
    )


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """As in the lanes' process, where the main thread must not start an OpenMP team of its own."""
    torch.set_num_threads(1)


@pytest.fixture(params=list(FAMILIES))
def served(request: pytest.FixtureRequest) -> Served:
    seed = random.randrange(2**31)
    print("seed:", seed)  # shown when a test fails
    return Served(request.param, seed)


def close(actual: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.1, "a flat reference would agree with anything"
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


def test_whole_prompt(served: Served) -> None:
    ids = torch.randint(0, 211, (37,))
    context = prefill_context([(served.table(37), 0, 37)])
    close(served.run(ids, context, served.groups()), served.expected(ids))


def test_prompt_in_arbitrary_chunks_and_layer_groups(served: Served) -> None:
    ids = torch.randint(0, 211, (41,))
    table = served.table(41)
    cuts = [0, 1, *sorted(served.random.sample(range(2, 41), 4)), 41]  # also a chunk with one token before it
    logits = [
        served.run(ids[first:end], prefill_context([(table, first, end)]), served.groups())
        for first, end in pairwise(cuts)
    ]
    close(torch.cat(logits), served.expected(ids))


def test_several_prompts_in_one_batch(served: Served) -> None:
    prompts = [torch.randint(0, 211, (n,)) for n in (1, 19, 8)]
    context = prefill_context([(served.table(len(p)), 0, len(p)) for p in prompts])
    close(served.run(torch.cat(prompts), context), torch.cat([served.expected(p) for p in prompts]))


def test_decode_rows_ride_with_prefill_chunks(served: Served) -> None:
    """One mixed step: the second chunk of one prompt, a whole other, and three sequences' next tokens."""
    running = [torch.randint(0, 211, (n,)) for n in (5, 30, 12)]
    tables = [served.table(len(ids)) for ids in running]
    for ids, table in zip(running, tables, strict=True):
        served.run(ids[:-1], prefill_context([(table, 0, len(ids) - 1)]))
    chunked, whole = torch.randint(0, 211, (26,)), torch.randint(0, 211, (9,))
    chunked_table = served.table(26)
    served.run(chunked[:11], prefill_context([(chunked_table, 0, 11)]))

    prefill = prefill_context([(chunked_table, 11, 26), (served.table(9), 0, 9)])
    context = with_decode(prefill, tables, [len(ids) for ids in running])
    batch = torch.cat((chunked[11:], whole, torch.stack([ids[-1] for ids in running])))
    expected = [served.expected(chunked)[11:], served.expected(whole)]
    expected += [served.expected(ids)[-1:] for ids in running]
    close(served.run(batch, context, served.groups()), torch.cat(expected))


def greedy(served: Served, prompts: list[Tensor], new_tokens: int) -> list[list[int]]:
    """Prefills each prompt alone, then decodes all of them in one batch."""
    tables = [served.table(len(p) + new_tokens) for p in prompts]
    out = [
        [int(served.run(p, prefill_context([(t, 0, len(p))]))[-1].argmax())]
        for p, t in zip(prompts, tables, strict=True)
    ]
    for step in range(1, new_tokens):
        context = with_decode(None, tables, [len(p) + step for p in prompts])
        logits = served.run(torch.tensor([ids[-1] for ids in out]), context)
        for ids, token in zip(out, logits.argmax(dim=-1).tolist(), strict=True):
            ids.append(token)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decode_equals_transformers(family: str) -> None:
    served = Served(family, seed=17)  # fixed: two logits of fresh weights may lie closer than any tolerance
    prompts = [torch.randint(0, 211, (n,)) for n in (3, 14, 9)]
    expected = []
    for prompt in prompts:
        ids = prompt
        for _ in range(32):
            ids = torch.cat((ids, served.expected(ids)[-1:].argmax(dim=-1)))
        expected.append(ids[len(prompt) :].tolist())
    assert greedy(served, prompts, 32) == expected
    assert greedy(served, prompts[:1], 32) == expected[:1]


def test_two_threads_at_once_change_nothing() -> None:
    served = Served("qwen3", seed=5)
    prompts = [torch.randint(0, 211, (n,)) for n in (6, 11)]
    decoded = greedy(served, prompts, 16)
    long_prompt = torch.randint(0, 211, (90,))
    expected = served.expected(long_prompt)
    table = served.table(90)
    mismatches: list[str] = []
    done = threading.Event()

    def prefill_lane() -> None:
        torch.set_num_threads(1)
        while not done.is_set():
            logits = served.run(long_prompt, prefill_context([(table, 0, 90)]), [(0, 1), (1, 3), (3, 4)])
            if not torch.allclose(logits, expected, atol=1e-4, rtol=1e-5):
                mismatches.append("prefill")

    lane = threading.Thread(target=prefill_lane)
    lane.start()
    try:
        blocks = list(served.free)
        for _ in range(12):
            served.free = list(blocks)
            if greedy(served, prompts, 16) != decoded:
                mismatches.append("decode")
    finally:
        done.set()
        lane.join()
    assert not mismatches


def test_missing_and_misshapen_tensors_are_named() -> None:
    served = Served("qwen2", seed=3)
    state = dict(served.reference.state_dict())
    bias = state.pop("model.layers.2.self_attn.k_proj.bias")
    with pytest.raises(BrokenCheckpoint, match=r"layers\.2\.self_attn\.k_proj\.bias"):
        Decoder(served.shape, state, torch.float32)
    state["model.layers.2.self_attn.k_proj.bias"] = bias[:-1]
    with pytest.raises(BrokenCheckpoint, match=r"k_proj\.bias' is \(15,\).*\(16,\)"):
        Decoder(served.shape, state, torch.float32)


def test_consume_empties_the_state_and_changes_nothing() -> None:
    served = Served("llama3", seed=4)
    ids = torch.randint(0, 211, (9,))
    expected = served.expected(ids)
    state = {name: weight.clone() for name, weight in served.reference.state_dict().items()}
    served.decoder = Decoder(served.shape, state, torch.float32, consume=True)
    assert not state
    close(served.run(ids, prefill_context([(served.table(9), 0, 9)])), expected)


def test_unknown_rope_scaling_is_refused() -> None:
    shape = Served("llama3", seed=1).shape
    odd = {f: getattr(shape, f) for f in shape.__dataclass_fields__} | {"rope_scaling": RopeScaling("yarn", 4.0)}
    with pytest.raises(UnsupportedModel, match="yarn"):
        inverse_frequencies(ModelShape(**odd))


def test_kv_cache_size() -> None:
    served = Served("qwen3", seed=2)
    nbytes = sum(layer.nbytes for layer in served.cache.layers)
    assert nbytes == served.cache.bytes_per_block * served.cache.num_blocks
    assert bytes_per_block(served.shape, BLOCK, torch.bfloat16) * 2 == served.cache.bytes_per_block
