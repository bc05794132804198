"""The work of a step, against torch's own count of what the plain decoder does."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from bulletserve.core.operators import StepShape, operators
from bulletserve.core.shapes import ModelShape
from bulletserve.engine.kv_cache import KvCache
from bulletserve.models.context import DecodeSegment, PrefillSegment, StepContext
from bulletserve.models.decoder import Decoder

BLOCK = 8
SHAPE = ModelShape("llama", 3, 64, 96, 4, 2, 16, 199, 512)
CHUNK = 128
"""Queries that the CPU's prefill attention scores at once, with all keys up to the last of them."""


def _product_flops(x: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * out_shape[0] * out_shape[1] * x[-1])


COUNTED = {torch.ops.mkldnn._linear_pointwise: _product_flops}
"""Prepacked products, which torch does not know how to count."""


class World:
    """A small decoder, and contexts of steps over its cache."""

    def __init__(self, shape: ModelShape = SHAPE) -> None:
        self.shape = shape
        self.decoder = Decoder(shape, _state(shape), torch.float32)
        self.cache = KvCache(shape, 400, BLOCK, torch.float32, torch.device("cpu"))
        self.next_block = 0

    def table(self, tokens: int) -> torch.Tensor:
        blocks = -(-tokens // BLOCK)
        self.next_block += blocks
        return torch.arange(self.next_block - blocks, self.next_block)

    def context(self, prompts: list[tuple[int, int]], lengths: list[int]) -> StepContext:
        """Prompts as (new, cached), decode rows by their lengths."""
        segments, positions, slots, row = [], [], [], 0
        for new, cached in prompts:
            table = self.table(cached + new)
            segments.append(PrefillSegment(row, row + new, table, cached + new))
            positions.append(torch.arange(cached, cached + new))
            slots.append(table[positions[-1] // BLOCK] * BLOCK + positions[-1] % BLOCK)
            row += new
        decode = None
        if lengths:
            tables = torch.stack([self.table(max(lengths)) for _ in lengths])
            at = torch.tensor(lengths) - 1
            positions.append(at)
            slots.append(tables[torch.arange(len(lengths)), at // BLOCK] * BLOCK + at % BLOCK)
            decode = DecodeSegment(row, row + len(lengths), tables, torch.tensor(lengths), max(lengths))
        return StepContext(torch.cat(positions), torch.cat(slots), tuple(segments), decode)

    def flops(self, prompts: list[tuple[int, int]], lengths: list[int], layers: int, sampled: int) -> int:
        """What torch counts while the decoder runs a step."""
        context = self.context(prompts, lengths)
        hidden = torch.randn(len(context.positions), self.shape.hidden_size)
        with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
            hidden = self.decoder.run_layers(hidden, 0, layers, context, self.cache)
            if sampled:
                self.decoder.logits(hidden[:sampled])
        return int(counter.get_total_flops())


def _state(shape: ModelShape) -> dict[str, torch.Tensor]:
    h, i, q, kv = (
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
    )
    layer = {
        "input_layernorm": (h,),
        "self_attn.q_proj": (q, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
        "post_attention_layernorm": (h,),
        "mlp.gate_proj": (i, h),
        "mlp.up_proj": (i, h),
        "mlp.down_proj": (h, i),
    }
    sizes = {f"model.layers.{n}.{name}.weight": s for n in range(shape.num_layers) for name, s in layer.items()}
    sizes |= {"model.embed_tokens.weight": (shape.vocab_size, h), "model.norm.weight": (h,)}
    sizes["lm_head.weight"] = (shape.vocab_size, h)
    return {name: torch.randn(size) * 0.1 for name, size in sizes.items()}


def computed_pairs(prompts: list[tuple[int, int]]) -> int:
    """Pairs that the CPU kernel computes: each chunk of queries against all keys up to its last, hidden ones too."""
    pairs = 0
    for new, cached in prompts:
        for start in range(0, new, CHUNK):
            stop = min(new, start + CHUNK)
            pairs += (stop - start) * (cached + stop)
    return pairs


def counted(step: StepShape, shape: ModelShape = SHAPE) -> int:
    return sum(each.flops * each.count for each in operators(shape, step))


def with_pairs(step: StepShape, pairs: int) -> StepShape:
    return step._replace(prefill_pairs=pairs)


@pytest.mark.parametrize(
    ("prompts", "lengths", "layers", "sampled"),
    [
        ([(37, 0)], [], 3, 1),
        ([(40, 24)], [], 3, 1),  # after a reused prefix
        ([(150, 30), (5, 90)], [], 2, 0),  # a layer group without the end
        ([], [64, 64, 64, 64, 64], 3, 5),
        ([(33, 16), (9, 0)], [48] * 6, 3, 8),  # mixed
    ],
)
def test_flops_are_those_that_torch_counts(
    prompts: list[tuple[int, int]], lengths: list[int], layers: int, sampled: int
) -> None:
    """Torch counts pairs that causality hides, so the step is given the pairs that the kernel computes."""
    step = StepShape.mixed(prompts, len(lengths), sum(lengths), layers, sampled)
    step = with_pairs(step, computed_pairs(prompts))
    assert World().flops(prompts, lengths, layers, sampled) == counted(step)


def test_one_query_at_a_time_is_the_causal_count() -> None:
    """Prompt tokens one by one compute no hidden pair: what torch counts then is the sum that `prefill` makes."""
    world = World()
    total = sum(world.flops([(1, before)], [], 3, 0) for before in range(20, 33))
    assert counted(StepShape.prefill([(13, 20)], 3, 0)) == total


def test_wide_heads_and_other_groups() -> None:
    shape = ModelShape("llama", 2, 48, 80, 6, 2, 24, 101, 512)
    step = with_pairs(StepShape.prefill([(20, 12)], 2, 1), computed_pairs([(20, 12)]))
    assert World(shape).flops([(20, 12)], [], 2, 1) == counted(step, shape)


def test_weight_bytes_are_the_parameters() -> None:
    step = StepShape.decode(3, 30, SHAPE.num_layers)
    weights = sum(each.weight_bytes * each.count for each in operators(SHAPE, step, 2))
    norms = (2 * SHAPE.num_layers + 1) * SHAPE.hidden_size
    embedding = SHAPE.vocab_size * SHAPE.hidden_size
    assert weights == 2 * (SHAPE.parameters - norms - embedding)


def test_cache_bytes_are_one_reading_of_it() -> None:
    step = StepShape.mixed([(10, 30), (5, 0)], 4, 100, SHAPE.num_layers, 4)
    read = sum(each.kv_bytes * each.count for each in operators(SHAPE, step, 2))
    assert read == 2 * SHAPE.kv_elements_per_token * (10 + 30 + 5 + 100)


def test_a_window_bounds_attention_alone() -> None:
    names = {name: getattr(SHAPE, name) for name in ModelShape.__dataclass_fields__}
    windowed = ModelShape(**(names | {"sliding_window": 16}))
    long = StepShape.mixed([(100, 0)], 2, 200, 3, 2)
    full, cut = operators(SHAPE, long), operators(windowed, long)
    for a, b in zip(full, cut, strict=True):
        assert b.flops < a.flops if "attention" in a.name else a == b
    short = StepShape.mixed([(8, 0)], 2, 20, 3, 2)
    assert operators(SHAPE, short) == operators(windowed, short)


def test_kinds_and_constructors() -> None:
    assert StepShape.prefill([(3, 4), (2, 0)], 5, 1) == StepShape(5, 3 * 4 + 6 + 3, 9, 0, 0, 5, 1)
    assert StepShape.decode(4, 400, 5) == StepShape(0, 0, 0, 4, 400, 5, 4)
    kinds = [StepShape.prefill([(3, 4)], 5, 0), StepShape.decode(1, 1, 5), StepShape.mixed([(1, 0)], 1, 9, 5, 1)]
    assert [step.kind for step in kinds] == ["prefill", "decode", "mixed"]
    assert [step.rows for step in kinds] == [3, 1, 2]


@pytest.mark.parametrize("counts", [(0, 0, 0, 0, 0, 3, 1), (-1, 0, 0, 2, 2, 3, 1), (4, 10, 4, 0, 0, -3, 1)])
def test_no_work_and_negative_work_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="step"):
        StepShape(*counts)


@given(new=st.integers(1, 5000), cut=st.integers(1, 5000), cached=st.integers(0, 9000))
def test_a_prompt_in_two_pieces_has_the_pairs_of_the_whole(new: int, cut: int, cached: int) -> None:
    if cut >= new:
        return
    whole = StepShape.prefill([(new, cached)], 3, 1)
    parts = [StepShape.prefill([(cut, cached)], 3, 0), StepShape.prefill([(new - cut, cached + cut)], 3, 1)]
    assert sum(part.prefill_pairs for part in parts) == whole.prefill_pairs
    assert sum(part.prefill_tokens for part in parts) == whole.prefill_tokens
