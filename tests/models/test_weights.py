"""Weights against what a decoder needs, and the random ones that stand in for them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bulletserve.core.errors import BrokenCheckpoint, UnsupportedModel
from bulletserve.core.shapes import ModelShape
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.formats.description import Array, Checkpoint, GgufTokenizer, StoredTensor
from bulletserve.formats.gguf import GgufFile
from bulletserve.formats.gguf_checkpoint import GgufWeights
from bulletserve.models.weights import dummy_state, load_state, tensor_shapes
from tests.models.smollm2 import transformers_model

SHAPE = ModelShape(
    architecture="llama",
    num_layers=2,
    hidden_size=16,
    intermediate_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=50,
    max_context=64,
)


class Stored:
    """Tensors in memory in place of files, and which of them were read."""

    def __init__(self, arrays: dict[str, tuple[Array, str]]) -> None:
        self.arrays = arrays
        self.read: list[str] = []

    def tensors(self) -> Iterator[StoredTensor]:
        for name, (array, tag) in self.arrays.items():
            yield StoredTensor(name, array.shape, tag, partial(self._read, name))

    def _read(self, name: str) -> Array:
        self.read.append(name)
        return self.arrays[name][0]


def stored(shape: ModelShape = SHAPE) -> dict[str, tuple[Array, str]]:
    numbers = np.random.default_rng(0)
    return {
        name: (numbers.standard_normal(size, dtype=np.float32), "float32")
        for name, size in tensor_shapes(shape).items()
    }


def checkpoint(arrays: dict[str, tuple[Array, str]], shape: ModelShape = SHAPE) -> tuple[Checkpoint, Stored]:
    weights = Stored(arrays)
    return Checkpoint("tiny", shape, "float32", weights=weights), weights


@pytest.mark.parametrize(
    ("shape", "model"),
    [
        (SHAPE, lambda sizes: LlamaForCausalLM(LlamaConfig(**sizes))),
        (replace(SHAPE, qkv_bias=True), lambda sizes: Qwen2ForCausalLM(Qwen2Config(**sizes))),
        (
            replace(SHAPE, qk_norm=True, head_dim=8, tied_embeddings=True),
            lambda sizes: Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)),
        ),
    ],
)
def test_a_decoder_needs_what_transformers_has(
    shape: ModelShape, model: Callable[[dict[str, int]], torch.nn.Module]
) -> None:
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": shape.head_dim,
    }
    # parameters, unlike the state, have tied weights once
    expected = {name: tuple(weights.shape) for name, weights in model(sizes).named_parameters()}
    assert tensor_shapes(shape) == expected
    assert sum(np.prod(size) for size in expected.values()) == shape.parameters


def test_every_stored_dtype_becomes_the_wanted_one() -> None:
    values = torch.linspace(-2, 2, 50 * 16).reshape(50, 16)
    for tag, array in (
        ("float32", values.numpy()),
        ("float16", values.half().numpy()),
        ("bfloat16", values.bfloat16().view(torch.uint16).numpy()),
    ):
        arrays = stored() | {"lm_head.weight": (array, tag)}
        for dtype in (torch.float32, torch.bfloat16):
            state = load_state(checkpoint(arrays)[0], dtype, "cpu")
            assert {weights.dtype for weights in state.values()} == {dtype}
            expected = values.to(getattr(torch, tag)).to(dtype)
            assert torch.equal(state["lm_head.weight"], expected)


def test_weights_are_no_view_of_a_file() -> None:
    arrays = stored()
    array = arrays["model.norm.weight"][0]
    array.flags.writeable = False
    state = load_state(checkpoint(arrays)[0], torch.float32, "cpu")
    state["model.norm.weight"].zero_()
    assert array.all()


def test_missing_and_misshapen_tensors_are_listed_before_any_is_read() -> None:
    arrays = stored()
    for name in ("q", "k", "v", "o"):
        del arrays[f"model.layers.1.self_attn.{name}_proj.weight"]
    broken, weights = checkpoint(arrays)
    with pytest.raises(
        BrokenCheckpoint, match=r"tiny: 4 tensors are missing: model\.layers\.1\.self_attn\.q_proj\.weight, .*, \.\.\."
    ):
        load_state(broken, torch.float32, "cpu")
    arrays = stored() | {"model.norm.weight": (np.ones(17, np.float32), "float32")}
    broken, more = checkpoint(arrays)
    with pytest.raises(BrokenCheckpoint, match=r"1 tensors do not fit: model\.norm\.weight is \(17,\), not \(16,\)"):
        load_state(broken, torch.float32, "cpu")
    assert weights.read == more.read == []


def test_weights_in_eight_bits_are_refused() -> None:
    arrays = stored() | {"model.norm.weight": (np.ones(16, np.uint8), "float8_e4m3fn")}
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is float8_e4m3fn"):
        load_state(checkpoint(arrays)[0], torch.float32, "cpu")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.down_proj.bias",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_tensors_that_change_results_are_refused(name: str) -> None:
    arrays = stored() | {name: (np.ones(16, np.float32), "float32")}
    with pytest.raises(UnsupportedModel, match=f"tiny: {name} is no part"):
        load_state(checkpoint(arrays)[0], torch.float32, "cpu")


def test_tensors_that_change_nothing_are_ignored() -> None:
    tied = replace(SHAPE, tied_embeddings=True)
    ones = (np.ones(16, np.float32), "float32")
    extra = {
        "lm_head.weight": ones,
        "model.layers.0.self_attn.rotary_emb.inv_freq": ones,
        "model.layers.2.input_layernorm.weight": ones,
        "vision.patch.bias": ones,
        "model.layers.0.self_attn.o_proj.bias": (np.zeros(16, np.float32), "float32"),
    }
    state = load_state(checkpoint(stored(tied) | extra, tied)[0], torch.float32, "cpu")
    assert state.keys() == tensor_shapes(tied).keys()


def test_a_dummy_checkpoint_loads_random_weights() -> None:
    state = load_state(Checkpoint("tiny", SHAPE, "float32"), torch.float32, "cpu", seed=3)
    expected = dummy_state(SHAPE, torch.float32, "cpu", seed=3)
    assert all(torch.equal(state[name], expected[name]) for name in tensor_shapes(SHAPE))


def test_dummy_weights_are_repeatable_and_of_the_right_shape() -> None:
    shape = replace(SHAPE, qkv_bias=True, qk_norm=True)
    first, again = (dummy_state(shape, torch.bfloat16, "cpu", seed=1) for _ in range(2))
    other = dummy_state(shape, torch.bfloat16, "cpu", seed=2)
    assert {name: tuple(weights.shape) for name, weights in first.items()} == tensor_shapes(shape)
    for name, weights in first.items():
        assert weights.dtype == torch.bfloat16
        assert torch.equal(weights, again[name])
        assert torch.equal(weights, other[name]) is name.endswith("norm.weight")


def test_dummy_rows_differ_beyond_the_end_of_the_pool() -> None:
    """Tables larger than the pool of random values, which is used over and over."""
    shape = replace(SHAPE, hidden_size=1024, vocab_size=10_000, num_layers=1)
    table = dummy_state(shape, torch.float32, "cpu")["lm_head.weight"]
    assert len(torch.unique(table, dim=0)) == 10_000
    assert table.std().item() == pytest.approx(1 / 32, rel=0.02)


def test_a_deep_dummy_stays_finite_and_prefers_some_tokens() -> None:
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
    )
    shape = replace(SHAPE, num_layers=64, hidden_size=128, intermediate_size=256, head_dim=32, vocab_size=500)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(dummy_state(shape, torch.bfloat16, "cpu"))
    with torch.inference_mode():
        output = model(torch.arange(20)[None], output_hidden_states=True)
    assert all(hidden.isfinite().all() and hidden.abs().max() < 100 for hidden in output.hidden_states)
    assert 0.3 < output.logits.float().std().item() < 3
    assert len(output.logits.argmax(-1).unique()) > 5


@pytest.mark.model
def test_smollm2_weights_are_those_in_the_file() -> None:
    """Weights sampled all over the file, worked out from its bytes one by one."""
    packaged = open_checkpoint(None)
    state = load_state(packaged, torch.float32, "cpu")
    assert sum(weights.numel() for weights in state.values()) == packaged.shape.parameters
    assert isinstance(packaged.weights, GgufWeights)
    file = GgufFile(packaged.weights.path)
    raw = file.path.read_bytes()

    def weight(name: str, row: int, column: int) -> np.float32:
        tensor = file.tensors[name]
        block, i = divmod(row * tensor.shape[1] + column, 32)
        if tensor.encoding.name == "Q8_0":
            at = tensor.start + 34 * block
            q = int.from_bytes(raw[at + 2 + i : at + 3 + i], signed=True)
            return np.float32(q) * np.float32(np.frombuffer(raw, "<f2", 1, at)[0])
        at = tensor.start + 20 * block
        d, m = np.frombuffer(raw, "<f2", 2, at).astype(np.float32)
        return np.float32(raw[at + 4 + i % 16] >> (4 * (i // 16)) & 15) * d + m

    numbers = np.random.default_rng(0)
    for _ in range(200):
        layer, column = int(numbers.integers(30)), int(numbers.integers(576))
        row = int(numbers.integers(49152))
        assert state["model.embed_tokens.weight"][row, column].item() == weight("token_embd.weight", row, column)
        row = int(numbers.integers(192))  # of k: three heads of 64, whose halves the file has interleaved
        head, half, i = row // 64, row % 64 // 32, row % 32
        stored_row = 64 * head + 2 * i + half
        key = state[f"model.layers.{layer}.self_attn.k_proj.weight"][row, column].item()
        assert key == weight(f"blk.{layer}.attn_k.weight", stored_row, column)
        row = int(numbers.integers(1536))
        up = state[f"model.layers.{layer}.mlp.up_proj.weight"][row, column].item()
        assert up == weight(f"blk.{layer}.ffn_up.weight", row, column)


@pytest.mark.model
def test_smollm2_knows_the_capital_of_france() -> None:
    torch.set_num_threads(1)
    tokenizer = open_checkpoint(None).tokenizer
    assert isinstance(tokenizer, GgufTokenizer)
    model = transformers_model()
    ids = [tokenizer.tokens.index(token) for token in ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")]
    with torch.inference_mode():
        best = model.eval()(torch.tensor([ids])).logits[0, -1].argmax().item()
    assert tokenizer.tokens[best] == "ĠParis"
