"""`config.json` of a Hugging Face folder as a `ModelShape`.

Knows nothing about weights or tokenizers. Reads both spellings of rotary settings (`rope_theta` and
`rope_scaling`; `rope_parameters` since transformers 5). A key that is absent means what transformers takes
it to mean for that architecture; a key that makes the model compute something we do not run is refused,
never ignored.
"""

from dataclasses import dataclass

from bulletserve.core.errors import BrokenCheckpoint, UnsupportedModel
from bulletserve.core.shapes import ModelShape, RopeScaling
from bulletserve.formats.description import check_shape
from bulletserve.formats.fields import Fields


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture's configuration class in transformers takes absent keys to mean."""

    name: str
    max_context: int
    head_dim: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", 2048),
    "MistralForCausalLM": _Family("mistral", 131072),
    "Qwen2ForCausalLM": _Family("qwen2", 32768, qkv_bias=True),
    "Qwen3ForCausalLM": _Family("qwen3", 32768, head_dim=128, qk_norm=True),
}


def huggingface_shape(config: Fields) -> ModelShape:
    """Raises `BrokenCheckpoint`, or `UnsupportedModel` with what is supported."""
    family = _family(config)
    _refuse_variants(config, family)
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.optional_integer("head_dim") or family.head_dim or hidden_size // max(num_heads, 1)
    max_context = config.integer("max_position_embeddings", family.max_context)
    num_layers = config.integer("num_hidden_layers")
    theta, scaling = _rope(config, max_context)
    shape = ModelShape(
        architecture=family.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", 8 if family.name == "mistral" else num_heads),
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_context=max_context,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(config, family.name, num_layers, max_context),
    )
    return check_shape(shape, config.where)


def _family(config: Fields) -> _Family:
    names = config.items("architectures", str)
    for name in names:
        if name in _FAMILIES:
            return _FAMILIES[name]
    if not names:  # a bare configuration: its type says as much
        for family in _FAMILIES.values():
            if family.name == config.optional_text("model_type"):
                return family
    found = ", ".join(names) or config.optional_text("model_type") or "not named"
    raise UnsupportedModel(f"{config.where}: architecture {found:.80}; we run {', '.join(_FAMILIES)}")


def _refuse_variants(config: Fields, family: _Family) -> None:
    where = config.where
    quantisation = config.table("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unnamed")
        raise UnsupportedModel(f"{where}: quantised weights ({method!s:.40}); we run unquantised ones, and GGUF")
    activation = config.optional_text("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{where}: activation {activation:.40}; we run silu")
    for name in ("attention_bias", "mlp_bias"):
        if config.flag(name) and not family.qkv_bias:  # Qwen2 has its biases whatever this key says
            raise UnsupportedModel(f"{where}: {name} is true; of biases, we run those of Qwen2's q, k and v only")


def _rope(config: Fields, max_context: int) -> tuple[float, RopeScaling]:
    """Theta and scaling. The keys of both spellings are the same but for where theta lies."""
    values = config.table("rope_scaling") or config.table("rope_parameters")
    rope = Fields(values, f"{config.where}: rope")
    if any(isinstance(value, dict) for value in values.values()):
        raise UnsupportedModel(f"{config.where}: rope parameters differ by layer; we run uniform decoders")
    for fields in (rope, config):
        if fields.number("partial_rotary_factor", 1.0) != 1:
            raise UnsupportedModel(f"{config.where}: partial rotary embeddings; we run full ones")
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    kind = rope.optional_text("rope_type") or rope.optional_text("type") or "default"
    if kind == "default":
        return theta, RopeScaling()
    if kind not in ("linear", "llama3"):
        raise UnsupportedModel(f"{config.where}: rope type {kind:.40}; we run default, linear and llama3")
    factor = rope.number("factor")
    if kind == "linear":
        scaling = RopeScaling("linear", factor)
    else:
        scaling = RopeScaling(
            "llama3",
            factor,
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.integer("original_max_position_embeddings", max_context),
        )
    if factor <= 0 or not 0 < scaling.low_freq_factor < scaling.high_freq_factor or scaling.original_context < 1:
        raise BrokenCheckpoint(f"{config.where}: rope scaling of {scaling} is impossible")
    return theta, scaling


def _sliding_window(config: Fields, family: str, num_layers: int, max_context: int) -> int | None:
    """The window of all layers; None where none has one, or one that no context exceeds."""
    if family == "llama":
        return None
    if family == "mistral":
        window = config.optional_integer("sliding_window") if config.has("sliding_window") else 4096
        windowed = num_layers
    else:
        window = config.integer("sliding_window", 4096) if config.flag("use_sliding_window") else None
        kinds = config.items("layer_types", str)
        full_below = config.integer("max_window_layers", 28)
        windowed = kinds.count("sliding_attention") if kinds else max(0, num_layers - full_below)
    if window is None or window >= max_context or windowed == 0:
        return None
    if window < 1:
        raise config.wrong("sliding_window", "positive")
    if windowed < num_layers:
        raise UnsupportedModel(
            f"{config.where}: {windowed} of {num_layers} layers have a sliding window; we run all or none"
        )
    return window
