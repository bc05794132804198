"""GGUF as a model: shapes, names, the order of rows, rope scaling, the vocabulary and its end tokens."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bulletserve.core.errors import BrokenCheckpoint, UnsupportedModel
from bulletserve.core.shapes import ModelShape, RopeScaling
from bulletserve.formats.description import GgufTokenizer
from bulletserve.formats.gguf_checkpoint import open_gguf
from bulletserve.models.weights import load_state

WriteGguf = Callable[..., Path]
TinyLlama = tuple[dict[str, object], list[tuple[str, tuple[int, ...], int, bytes]]]

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "head_dim": 4})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    name = name.replace("model.layers.", "blk.").replace("self_attn.", "").replace("mlp.", "ffn_")
    for theirs, ours in {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "o_proj": "attn_output",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
    }.items():
        name = name.replace(theirs, ours)
    return name


def interleaved(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows i and i + head_dim / 2 of each head side by side, as llama.cpp wants them: row by row, on purpose."""
    head_dim = weights.shape[0] // heads
    order = [
        head * head_dim + half * (head_dim // 2) + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weights[order]


def as_gguf(architecture: str, state: dict[str, torch.Tensor]) -> TinyLlama:
    head_dim = 4 if architecture == "qwen2" else 8
    metadata: dict[str, object] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": 2,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": 24,
        f"{architecture}.feed_forward_length": 48,
        f"{architecture}.attention.head_count": 6,
        f"{architecture}.attention.head_count_kv": 2,
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": np.float64(1e-5),
    }
    tensors = []
    for name, weights in state.items():
        if architecture == "llama" and ".q_proj" in name:
            weights = interleaved(weights, 6)
        if architecture == "llama" and ".k_proj" in name:
            weights = interleaved(weights, 2)
        tensors.append((gguf_name(name), tuple(weights.shape), 0, weights.numpy().tobytes()))
    return metadata, tensors


@pytest.mark.parametrize("architecture", MODELS)
def test_a_converted_model_comes_back(write_gguf: WriteGguf, architecture: str) -> None:
    torch.manual_seed(0)
    model = MODELS[architecture]()
    state = {name: weights for name, weights in model.state_dict().items() if "inv_freq" not in name}
    for weights in state.values():  # biases and norms start as zeros and ones, which would hide a mix-up
        weights.normal_()
    tied = architecture == "qwen3"
    if tied:
        del state["lm_head.weight"]
    checkpoint = open_gguf(write_gguf(*as_gguf(architecture, state), name="some-model.gguf"))
    assert checkpoint.name == "some-model"
    assert checkpoint.default_dtype == "float32"
    assert checkpoint.tokenizer is None
    assert checkpoint.shape == ModelShape(
        architecture=architecture,
        num_layers=2,
        hidden_size=24,
        intermediate_size=48,
        num_heads=6,
        num_kv_heads=2,
        head_dim=4 if architecture == "qwen2" else 8,
        vocab_size=40,
        max_context=128,
        tied_embeddings=tied,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
    )
    loaded = load_state(checkpoint, torch.float32, "cpu")
    assert loaded.keys() == state.keys()
    for name, weights in state.items():
        assert torch.equal(loaded[name], weights), name


def test_vocabulary_and_end_tokens(write_gguf: WriteGguf, tiny_llama: TinyLlama) -> None:
    checkpoint = open_gguf(write_gguf(*tiny_llama))
    assert checkpoint.tokenizer == GgufTokenizer(
        model="gpt2",
        pre="smollm",
        tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "</s>", "Ġ"),
        token_types=(3, 3, 3, 1, 1, 1, 1, 1),
        merges=("a b",),
        scores=(),
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        pad_token_id=2,
        add_bos=False,
        add_eos=False,
        add_space_prefix=False,
    )
    assert checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.bos_token_id == 1
    # the named one, then the marked <|endoftext|>; "</s>" is a normal token here, which users can type
    assert checkpoint.eos_token_ids == (2, 0)


def changed(tiny: TinyLlama, **changes: object) -> TinyLlama:
    """The tiny model with some metadata replaced (None: left out); dots in keys are written as two underscores."""
    metadata = {**tiny[0], **{key.replace("__", "."): value for key, value in changes.items()}}
    return {key: value for key, value in metadata.items() if value is not None}, tiny[1]


def test_end_of_turn_is_an_end(write_gguf: WriteGguf, tiny_llama: TinyLlama) -> None:
    path = write_gguf(*changed(tiny_llama, tokenizer__ggml__eot_token_id=5, tokenizer__ggml__eos_token_id=None))
    assert open_gguf(path).eos_token_ids == (5, 0, 2)


def test_sentencepiece_vocabulary(write_gguf: WriteGguf, tiny_llama: TinyLlama) -> None:
    scores = np.arange(8, dtype=np.float32)
    path = write_gguf(
        *changed(
            tiny_llama,
            tokenizer__ggml__model="llama",
            tokenizer__ggml__scores=scores,
            tokenizer__ggml__add_bos_token=None,
            tokenizer__ggml__merges=None,
        )
    )
    tokenizer = open_gguf(path).tokenizer
    assert isinstance(tokenizer, GgufTokenizer)
    assert (tokenizer.model, tokenizer.scores, tokenizer.merges) == ("llama", tuple(range(8)), ())
    assert tokenizer.add_bos
    assert tokenizer.add_space_prefix


def test_a_checkpoint_can_be_sent_to_another_process(write_gguf: WriteGguf, tiny_llama: TinyLlama) -> None:
    checkpoint = open_gguf(write_gguf(*tiny_llama))
    copy = pickle.loads(pickle.dumps(checkpoint))
    assert copy == checkpoint
    assert [tensor.name for tensor in copy.tensors()] == [tensor.name for tensor in checkpoint.tensors()]


def test_a_dummy_has_no_tensors(write_gguf: WriteGguf, tiny_llama: TinyLlama) -> None:
    checkpoint = open_gguf(write_gguf(*tiny_llama), dummy=True)
    assert checkpoint.weights is None
    assert list(checkpoint.tensors()) == []
    assert checkpoint.shape == open_gguf(write_gguf(*tiny_llama)).shape


@pytest.mark.parametrize(
    ("types", "dtype"), [((0, 0), "float32"), ((1, 0), "float16"), ((30, 0), "bfloat16"), ((8, 0), "bfloat16")]
)
def test_dtype_is_that_of_most_weights(
    write_gguf: WriteGguf, tiny_llama: TinyLlama, types: tuple[int, int], dtype: str
) -> None:
    """A large matrix of the first type beside small tensors of the second, which norms always have."""
    size = {0: 4 * 64, 1: 2 * 64, 30: 2 * 64, 8: 2 * 34}[types[0]]
    metadata = {**tiny_llama[0], "llama.embedding_length": 64, "llama.attention.key_length": 4}
    metadata["tokenizer.ggml.model"] = "no_vocab"
    big = ("token_embd.weight", (64, 64), types[0], bytes(64 * size))
    path = write_gguf(metadata, [big, ("output_norm.weight", (64,), types[1], bytes(256))])
    assert open_gguf(path).default_dtype == dtype


def with_divisors(tiny: TinyLlama, divisors: np.ndarray) -> TinyLlama:
    """The tiny model with heads of 64, for 32 rotary pairs, and a tensor of divisors."""
    metadata = {**tiny[0], "llama.attention.key_length": 64, "llama.rope.freq_base": 500000.0}
    raw = divisors.astype(np.float32)
    return metadata, [*tiny[1], ("rope_freqs.weight", raw.shape, 0, raw.tobytes())]


@pytest.mark.parametrize(("factor", "context"), [(8.0, 8192), (32.0, 8192), (4.0, 2048)])
def test_llama3_scaling_is_found_again(
    write_gguf: WriteGguf, tiny_llama: TinyLlama, factor: float, context: int
) -> None:
    settings = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0}
    settings |= {"high_freq_factor": 4.0, "original_max_position_embeddings": context}
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=settings)
    plain = 1 / (500000.0 ** (torch.arange(0, 64, 2).float() / 64))
    divisors = (plain / ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]).numpy()
    metadata, tensors = with_divisors(tiny_llama, divisors)
    if context != 8192:
        metadata["llama.rope.scaling.original_context_length"] = context
    scaling = open_gguf(write_gguf(metadata, tensors)).shape.rope_scaling
    assert scaling.factor == pytest.approx(factor, rel=1e-6)
    assert replace(scaling, factor=factor) == RopeScaling("llama3", factor, 1.0, 4.0, context)


def test_divisors_are_no_weight_and_ones_are_no_scaling(write_gguf: WriteGguf, tiny_llama: TinyLlama) -> None:
    checkpoint = open_gguf(write_gguf(*with_divisors(tiny_llama, np.ones(32))))
    assert checkpoint.shape.rope_scaling == RopeScaling()
    assert "rope_freqs.weight" not in {tensor.name for tensor in checkpoint.tensors()}


@pytest.mark.parametrize("divisors", [np.linspace(1, 8, 32), np.full(32, np.nan), np.zeros(32)])
def test_other_divisors_are_refused(write_gguf: WriteGguf, tiny_llama: TinyLlama, divisors: np.ndarray) -> None:
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        open_gguf(write_gguf(*with_divisors(tiny_llama, divisors)))


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"llama__rope__scale_linear": 2.0}, RopeScaling("linear", 2.0)),
        ({"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 4.0}, RopeScaling()),
        ({"llama__rope__scaling__factor": 0.0}, RopeScaling()),
    ],
)
def test_linear_scaling(
    write_gguf: WriteGguf, tiny_llama: TinyLlama, changes: dict[str, object], scaling: RopeScaling
) -> None:
    assert open_gguf(write_gguf(*changed(tiny_llama, **changes))).shape.rope_scaling == scaling


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general__architecture": "gemma2"}, "'gemma2'; we run llama, qwen2, qwen3"),
        ({"split__count": np.uint16(3)}, "one part of several"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__rope__dimension_count": 2}, "rope.dimension_count is 2, head_dim 4"),
        ({"llama__attention__value_length": 2}, "attention.value_length is 2, head_dim 4"),
        ({"llama__rope__scaling__type": "yarn"}, "'yarn'"),
        ({"llama__attention__sliding_window": 32}, "sliding window"),
        ({"llama__attention__head_count_kv": np.array([1, 2], np.int32)}, "differs by layer"),
    ],
)
def test_what_we_do_not_run_is_named(
    write_gguf: WriteGguf, tiny_llama: TinyLlama, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        open_gguf(write_gguf(*changed(tiny_llama, **changes)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general__architecture": None}, "general.architecture must be a string, but is absent"),
        ({"llama__block_count": None}, "llama.block_count must be an integer, but is absent"),
        ({"llama__block_count": "two"}, "llama.block_count must be an integer, but is 'two'"),
        ({"llama__block_count": 4_000_000_000}, "num_layers is 4000000000"),
        ({"llama__attention__head_count": 0}, "num_heads is 0"),
        ({"llama__attention__head_count_kv": 3}, "cannot share"),
        ({"llama__attention__key_length": 3}, "head_dim is 3"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "finite"),
        ({"llama__rope__freq_base": 0.0}, "rope_theta is 0.0"),
        ({"llama__rope__scaling__factor": -1.0}, "positive"),
        ({"tokenizer__ggml__tokens": ["a"] * 9}, "9 tokens for 8 rows"),
        ({"tokenizer__ggml__tokens": ["a"]}, "differ in length"),
        ({"tokenizer__ggml__tokens": "abc"}, "a list of str"),
        ({"tokenizer__ggml__eos_token_id": 8}, "the id of one of 8 tokens"),
    ],
)
def test_damaged_metadata_is_named(
    write_gguf: WriteGguf, tiny_llama: TinyLlama, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(BrokenCheckpoint, match=named):
        open_gguf(write_gguf(*changed(tiny_llama, **changes)))


def test_a_model_without_embeddings_is_broken(write_gguf: WriteGguf, tiny_llama: TinyLlama) -> None:
    with pytest.raises(BrokenCheckpoint, match=r"token_embd\.weight is missing"):
        open_gguf(write_gguf(tiny_llama[0], tiny_llama[1][1:]))


@pytest.mark.parametrize(
    "name", ["blk.0.attn_sinks.weight", "token_embd_norm.weight", "blk.x.attn_q.weight", "attn_q.weight"]
)
def test_unknown_tensors_are_refused(write_gguf: WriteGguf, tiny_llama: TinyLlama, name: str) -> None:
    checkpoint = open_gguf(write_gguf(tiny_llama[0], [*tiny_llama[1], (name, (1,), 0, bytes(4))]))
    with pytest.raises(UnsupportedModel, match=name):
        list(checkpoint.tensors())


def test_rows_that_are_no_heads_are_broken(write_gguf: WriteGguf, tiny_llama: TinyLlama) -> None:
    tensors = [line if ".attn_q." not in line[0] else (line[0], (5, 8), 0, bytes(160)) for line in tiny_llama[1]]
    query = [tensor for tensor in open_gguf(write_gguf(tiny_llama[0], tensors)).tensors() if ".q_proj." in tensor.name]
    with pytest.raises(BrokenCheckpoint, match="5 rows, not 2 heads"):
        query[0].read()
