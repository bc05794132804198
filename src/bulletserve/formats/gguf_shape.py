"""The `ModelShape` in a GGUF file's metadata.

Knows nothing about weights, except that which tensors exist is part of the description: tied embeddings
have no `output.weight`, and Llama 3.1's rope scaling is a tensor of divisors. Metadata that names one of
our architectures but makes it compute something else is refused, never ignored.
"""

import math
from dataclasses import replace

import numpy as np

from bulletserve.core.errors import BrokenCheckpoint, UnsupportedModel
from bulletserve.core.shapes import ModelShape, RopeScaling
from bulletserve.formats.description import check_shape
from bulletserve.formats.fields import Fields
from bulletserve.formats.gguf import GgufFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of `general.architecture` that we run. Mistral's models are "llama" here."""

ROPE_DIVISORS = "rope_freqs.weight"


def gguf_shape(file: GgufFile) -> ModelShape:
    """Raises `BrokenCheckpoint`, or `UnsupportedModel` with what is supported."""
    where = str(file.path)
    architecture = Fields(file.metadata, where).text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(f"{where}: architecture {architecture!r:.80}; we run {', '.join(ARCHITECTURES)}")
    if Fields(file.metadata, where).integer("split.count", 1) > 1:
        raise UnsupportedModel(f"{where}: one part of several; join them with `llama-gguf-split --merge`")
    if "token_embd.weight" not in file.tensors:
        raise BrokenCheckpoint(f"{where}: tensor token_embd.weight is missing")
    fields = Fields(file.metadata, where, f"{architecture}.")
    _refuse_per_layer_sizes(fields)
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    shape = ModelShape(
        architecture=architecture,
        num_layers=fields.integer("block_count"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=fields.integer("attention.key_length", hidden_size // max(num_heads, 1)),
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        max_context=fields.integer("context_length"),
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        tied_embeddings="output.weight" not in file.tensors,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
    )
    check_shape(shape, where)
    _refuse_variants(fields, shape)
    return replace(shape, rope_scaling=_rope_scaling(shape, file, fields))


def _refuse_per_layer_sizes(fields: Fields) -> None:
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(fields.raw(name), list):
            raise UnsupportedModel(f"{fields.where}: {name} differs by layer; we run uniform decoders")


def _refuse_variants(fields: Fields, shape: ModelShape) -> None:
    for name in ("rope.dimension_count", "attention.value_length"):
        size = fields.integer(name, shape.head_dim)
        if size != shape.head_dim:
            raise UnsupportedModel(f"{fields.where}: {name} is {size}, head_dim {shape.head_dim}; we run equal ones")
    if fields.integer("expert_count", 0) > 0:
        raise UnsupportedModel(f"{fields.where}: a mixture of experts; we run dense decoders")
    # llama.cpp writes and obeys no window for these architectures: what a file with one means is unclear
    if 0 < fields.integer("attention.sliding_window", 0) < shape.max_context:
        raise UnsupportedModel(f"{fields.where}: a sliding window in GGUF; use the safetensors checkpoint")


def _rope_scaling(shape: ModelShape, file: GgufFile, fields: Fields) -> RopeScaling:
    kind = fields.optional_text("rope.scaling.type") or "linear"  # llama.cpp's default, with a factor of one
    if kind not in ("none", "linear"):
        raise UnsupportedModel(f"{fields.where}: rope scaling {kind!r:.40}; we run none, linear and llama3")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "none" or factor == 0:  # llama.cpp's two words for "not scaled"
        factor = 1.0
    if factor < 0:
        raise fields.wrong("rope.scaling.factor", "positive")
    if ROPE_DIVISORS not in file.tensors:
        return RopeScaling() if factor == 1 else RopeScaling("linear", factor)
    if factor != 1:
        raise UnsupportedModel(f"{fields.where}: a linear rope factor and {ROPE_DIVISORS} at once")
    original_context = fields.integer("rope.scaling.original_context_length", RopeScaling().original_context)
    if original_context < 1:
        raise fields.wrong("rope.scaling.original_context_length", "positive")
    return _llama3_scaling(shape, file, original_context)


def _llama3_scaling(shape: ModelShape, file: GgufFile, original_context: int) -> RopeScaling:
    """The parameters behind a tensor of divisors, one per rotary pair.

    Converters evaluate Llama 3.1's scheme and store its result only. The parameters are guessed (the factor
    is the largest divisor; the others are as published) and accepted if they give the tensor back.
    """
    divisors = file.read(file.tensors[ROPE_DIVISORS])
    if divisors.dtype != np.float32 or divisors.shape != (shape.head_dim // 2,):
        raise BrokenCheckpoint(f"{file.path}: {ROPE_DIVISORS} is no float32 vector of head_dim / 2 elements")
    if np.all(divisors == 1):
        return RopeScaling()
    guess = RopeScaling("llama3", float(divisors.max()), original_context=original_context)
    with np.errstate(all="ignore"):  # a damaged theta or divisor may overflow: then nothing matches
        frequencies = shape.rope_theta ** -np.linspace(0, 1, len(divisors), endpoint=False)
        turns = original_context / (2 * math.pi) * frequencies  # within the context of the first training
        kept = (turns - guess.low_freq_factor) / (guess.high_freq_factor - guess.low_freq_factor)
        kept = np.clip(kept, 0, 1)  # the share of a frequency that is not stretched
        expected = 1 / ((1 - kept) / guess.factor + kept)
    # converters work in float32; a factor of 32 makes its error visible in the fifth digit
    if not np.allclose(divisors, expected, rtol=1e-4, atol=0):
        raise UnsupportedModel(f"{file.path}: {ROPE_DIVISORS} is not Llama 3.1's scheme, the only one we run")
    return guess
