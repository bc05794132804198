"""Folders as transformers saves them, and configurations in every spelling that is in use."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    GenerationConfig,
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

from bulletserve.core.errors import BrokenCheckpoint, ModelError, ModelMissing, UnsupportedModel
from bulletserve.core.shapes import ModelShape, RopeScaling
from bulletserve.formats.description import GenerationDefaults, JsonTokenizer
from bulletserve.formats.fields import Fields
from bulletserve.formats.huggingface import open_huggingface
from bulletserve.formats.huggingface_config import huggingface_shape
from bulletserve.models.weights import load_state

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE = {
    "num_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_heads": 6,
    "num_kv_heads": 2,
    "vocab_size": 40,
    "max_context": 128,
    "rms_eps": 1e-6,
}
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], ModelShape]] = {
    "llama": (
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3))),
        ModelShape(
            "llama",
            **BASE,
            head_dim=4,
            rope_theta=500000.0,
            rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
        ),
    ),
    "mistral": (
        lambda: MistralForCausalLM(MistralConfig(**SIZES, head_dim=8, sliding_window=32)),
        ModelShape("mistral", **BASE, head_dim=8, sliding_window=32),
    ),
    "qwen2": (
        lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
        ModelShape("qwen2", **BASE, head_dim=4, qkv_bias=True, tied_embeddings=True),
    ),
    "qwen3": (
        lambda: Qwen3ForCausalLM(
            Qwen3Config(**SIZES, head_dim=16, use_sliding_window=True, sliding_window=16, max_window_layers=0)
        ),
        ModelShape("qwen3", **BASE, head_dim=16, qk_norm=True, sliding_window=16),
    ),
}


def saved(folder: Path, name: str, **options: object) -> dict[str, torch.Tensor]:
    """A random model of transformers, saved in bfloat16; its weights."""
    torch.manual_seed(0)
    model = MODELS[name][0]().to(torch.bfloat16)
    for weights in model.parameters():  # biases and norms start as zeros and ones, which would hide a mix-up
        weights.data.normal_()
    model.save_pretrained(folder, **options)
    return {key: value for key, value in model.state_dict().items() if key != "lm_head.weight" or name != "qwen2"}


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_comes_back(tmp_path: Path, name: str, shards: int) -> None:
    folder = tmp_path / "my-model"
    state = saved(folder, name, max_shard_size="1GB" if shards == 1 else "10KB")
    assert (len(list(folder.glob("*.safetensors"))) > 1) is (shards > 1)
    checkpoint = open_huggingface(folder)
    assert checkpoint.name == "my-model"
    assert checkpoint.default_dtype == "bfloat16"
    assert checkpoint.shape == MODELS[name][1]
    assert checkpoint.shape.parameters == sum(weights.numel() for weights in state.values())
    loaded = load_state(pickle.loads(pickle.dumps(checkpoint)), torch.bfloat16, "cpu")
    assert loaded.keys() == state.keys()
    for key, weights in state.items():
        assert torch.equal(loaded[key], weights), key


def shape_of(**values: object) -> ModelShape:
    return huggingface_shape(Fields({"architectures": ["LlamaForCausalLM"], **SIZES, **values}, "config.json"))


def test_absent_keys_mean_what_transformers_takes_them_to_mean() -> None:
    sizes = {
        key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "max_position_embeddings")
    }
    for name, config_class in (
        ("Llama", LlamaConfig),
        ("Mistral", MistralConfig),
        ("Qwen2", Qwen2Config),
        ("Qwen3", Qwen3Config),
    ):
        heads = {} if name != "Mistral" else {"num_attention_heads": 8, "hidden_size": 32}
        config = config_class(**sizes | heads)
        shape = huggingface_shape(Fields({"architectures": [f"{name}ForCausalLM"], **sizes, **heads}, "config.json"))
        assert shape.max_context == config.max_position_embeddings
        assert shape.rms_eps == config.rms_norm_eps
        assert shape.rope_theta == config.rope_parameters["rope_theta"]
        assert shape.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        assert shape.tied_embeddings == config.tie_word_embeddings
        assert shape.sliding_window == getattr(config, "sliding_window", None)
        if name in ("Llama", "Mistral"):  # the Qwen classes default to 32, which no config.json relies on
            assert shape.num_kv_heads == config.num_key_value_heads


def test_a_null_is_an_absent_key() -> None:
    assert shape_of(head_dim=None, num_key_value_heads=None, rope_scaling=None) == shape_of(num_key_value_heads=6)


def test_a_bare_configuration_is_known_by_its_type() -> None:
    assert shape_of(architectures=None, model_type="qwen3").qk_norm


@pytest.mark.parametrize(
    ("values", "theta", "scaling"),
    [
        ({"rope_theta": 1e6}, 1e6, RopeScaling()),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, RopeScaling()),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, 1e6, RopeScaling()),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 1e4, RopeScaling("linear", 2.0)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 1e4, RopeScaling("linear", 2.0)),
        ({"rope_scaling": LLAMA3}, 5e5, RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {**LLAMA3, "rope_theta": None, "original_max_position_embeddings": None},
            },
            5e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 128),
        ),
    ],
)
def test_both_spellings_of_rope(values: dict[str, object], theta: float, scaling: RopeScaling) -> None:
    shape = shape_of(**values)
    assert (shape.rope_theta, shape.rope_scaling) == (theta, scaling)


QWEN = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 32}


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({"sliding_window": 32}, None),  # Llama has no window, whatever its file says
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, 32),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, 4096),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, None),  # no context exceeds it
        ({**QWEN, "max_window_layers": 0}, 32),
        ({**QWEN, "max_window_layers": 2}, None),
        ({**QWEN, "max_window_layers": 0, "use_sliding_window": False}, None),
        ({**QWEN, "layer_types": ["sliding_attention"] * 2}, 32),
        ({**QWEN, "layer_types": ["full_attention"] * 2, "max_window_layers": 0}, None),
    ],
)
def test_sliding_windows(values: dict[str, object], window: int | None) -> None:
    assert shape_of(**values).sliding_window == window


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM; we run LlamaForCausalLM, Mistral"),
        ({"architectures": None, "model_type": "gemma"}, "gemma; we run"),
        ({"architectures": []}, "not named; we run"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised weights \(awq\)"),
        ({"hidden_act": "gelu"}, "activation gelu; we run silu"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type yarn; we run default, linear and llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({**QWEN, "max_window_layers": 1}, "1 of 2 layers have a sliding window"),
        ({**QWEN, "layer_types": ["full_attention", "sliding_attention"]}, "1 of 2 layers"),
    ],
)
def test_what_we_do_not_run_is_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"config.json: .*{named}"):
        shape_of(**values)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"hidden_size": None}, "hidden_size must be an integer, but is absent"),
        ({"hidden_size": "24"}, "hidden_size must be an integer, but is '24'"),
        ({"hidden_size": True}, "must be an integer"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_attention_heads": 7}, "7 attention heads cannot share 2"),
        ({"head_dim": 5}, "head_dim is 5"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": 10**400}, "fits a double"),
        ({"rms_norm_eps": "small"}, "a number"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"tie_word_embeddings": "no"}, "true or false"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a number, but is absent"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "impossible"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "impossible"),
        ({"architectures": "LlamaForCausalLM"}, "a list of str"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window must be positive"),
    ],
)
def test_damaged_configurations_are_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(BrokenCheckpoint, match=f"config.json: .*{named}"):
        shape_of(**values)


def test_qwen2_has_its_biases_whatever_the_file_says() -> None:
    assert shape_of(architectures=["Qwen2ForCausalLM"], attention_bias=True).qkv_bias


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama without anything optional."""
    write(tmp_path / "config.json", {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2, **SIZES})
    save_file({"model.norm.weight": torch.ones(24, dtype=torch.float16)}, tmp_path / "model.safetensors")
    return tmp_path


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def test_optional_files_may_be_absent(folder: Path) -> None:
    checkpoint = open_huggingface(folder)
    assert checkpoint.tokenizer is None
    assert checkpoint.chat_template is None
    assert checkpoint.generation_defaults == GenerationDefaults()
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.bos_token_id is None
    assert checkpoint.default_dtype == "float16"  # the configuration does not say: that of the first tensor


@pytest.mark.parametrize(
    ("values", "dtype"),
    [({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "float32"}, "float32"), ({"dtype": "auto"}, "float16")],
)
def test_dtype_of_the_configuration_comes_first(folder: Path, values: dict[str, str], dtype: str) -> None:
    write(folder / "config.json", {"architectures": ["LlamaForCausalLM"], **SIZES, **values})
    assert open_huggingface(folder).default_dtype == dtype


def test_generation_config_has_the_last_word(folder: Path) -> None:
    GenerationConfig(
        temperature=0.6, top_p=0.9, top_k=20, eos_token_id=[7, 8, 7], bos_token_id=1, do_sample=True
    ).save_pretrained(folder)
    checkpoint = open_huggingface(folder)
    assert checkpoint.eos_token_ids == (7, 8)
    assert checkpoint.bos_token_id == 1
    assert checkpoint.generation_defaults == GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20)


def test_sampling_values_count_whatever_do_sample_says(folder: Path) -> None:
    values = {"do_sample": False, "temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 9}
    write(folder / "generation_config.json", values)
    expected = GenerationDefaults(temperature=0.7, min_p=0.1, repetition_penalty=1.1, max_new_tokens=9)
    assert open_huggingface(folder).generation_defaults == expected


@pytest.mark.parametrize("eos_token", ["<end>", {"content": "<end>", "__type": "AddedToken"}])
def test_the_tokenizer_names_the_end_if_nothing_else_does(folder: Path, eos_token: object) -> None:
    write(folder / "config.json", {"architectures": ["LlamaForCausalLM"], **SIZES})
    write(folder / "tokenizer.json", {"added_tokens": [{"id": 4, "content": "<x>"}, {"id": 5, "content": "<end>"}]})
    write(folder / "tokenizer_config.json", {"eos_token": eos_token})
    checkpoint = open_huggingface(folder)
    assert checkpoint.eos_token_ids == (5,)
    assert checkpoint.tokenizer == JsonTokenizer(folder / "tokenizer.json", {"eos_token": eos_token})
    write(folder / "tokenizer_config.json", {"eos_token": None})
    assert open_huggingface(folder).eos_token_ids == ()


def test_chat_templates_in_all_three_places(folder: Path) -> None:
    write(folder / "tokenizer.json", {})
    assert open_huggingface(folder).chat_template is None
    write(folder / "tokenizer_config.json", {"chat_template": "one"})
    assert open_huggingface(folder).chat_template == "one"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}, {"name": []}]
    write(folder / "tokenizer_config.json", {"chat_template": several})
    assert open_huggingface(folder).chat_template == "two"
    (folder / "chat_template.jinja").write_text("drei ü", encoding="utf-8")
    assert open_huggingface(folder).chat_template == "drei ü"


def test_damaged_weights_show_when_the_folder_is_opened(folder: Path) -> None:
    write(folder / "config.json", {"architectures": ["LlamaForCausalLM"], "dtype": "float16", **SIZES})
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-1])
    with pytest.raises(BrokenCheckpoint, match=r"model.safetensors: tensor 'model.norm.weight'"):
        open_huggingface(folder)


def test_a_dummy_needs_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    checkpoint = open_huggingface(folder, dummy=True)
    assert checkpoint.weights is None
    assert checkpoint.default_dtype == "bfloat16"
    with pytest.raises(ModelMissing, match=r"no model.safetensors and no model.safetensors.index.json"):
        open_huggingface(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="save them as safetensors"):
        open_huggingface(folder)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ({}, "weight_map is empty"),
        ({"weight_map": {"a": 1}}, "no file name"),
        ({"weight_map": {"a": "../model.safetensors"}}, "no file name"),
        ({"weight_map": {"a": ".."}}, "no file name"),
        ({"weight_map": {"a": "x" * 5000}}, "1 of 1 weight files are missing"),
        ({"weight_map": {"a": "one.safetensors", "b": "shard.safetensors"}}, "1 of 2 weight files are missing: one"),
        ({"weight_map": {"a": "shard.safetensors"}}, "lacks 1 tensors of the index, 'a' first"),
    ],
)
def test_damaged_indices_are_named(folder: Path, index: object, named: str) -> None:
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    write(folder / "model.safetensors.index.json", index)
    with pytest.raises(BrokenCheckpoint, match=named):
        open_huggingface(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_unreadable_documents_are_named(folder: Path, name: str) -> None:
    write(folder / "tokenizer.json", {})
    for raw in (b"\xff", b"") if name.endswith(".json") else (b"\xff",):
        (folder / name).write_bytes(raw)
        with pytest.raises(BrokenCheckpoint, match=name):
            open_huggingface(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(ModelError, match=name):
        open_huggingface(folder)
