"""A GGUF writer for the tests of this folder, written from the published layout and sharing nothing with the reader."""

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

TensorLine = tuple[str, tuple[int, ...], int, bytes]  # name, row-major shape, ggml type, data

_NUMPY_KINDS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    """Type number and value. Python's own numbers become uint32, float32 and bool; numpy's keep their type."""
    if isinstance(value, str | bytes):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    if isinstance(value, np.ndarray):
        kind = _NUMPY_KINDS[value.dtype.str[1:]]
        return struct.pack("<IIQ", 9, kind, len(value)) + value.tobytes()
    if isinstance(value, np.generic):
        return struct.pack("<I", _NUMPY_KINDS[value.dtype.str[1:]]) + value.tobytes()
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    assert isinstance(value, float)
    return struct.pack("<If", 6, value)


def gguf_bytes(
    metadata: Mapping[str | bytes, object], tensors: Sequence[TensorLine] = (), *, version: int = 3, alignment: int = 32
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, shape, kind, raw in tensors:
        data += bytes(-len(data) % alignment)
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += raw
    return head + bytes(-len(head) % alignment) + data


@pytest.fixture(scope="session", name="gguf_bytes")
def gguf_bytes_fixture() -> Callable[..., bytes]:
    """`gguf_bytes(metadata, tensors, version=3, alignment=32)`: the bytes of a GGUF file."""
    return gguf_bytes


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """The same, written to a file; its path."""

    def write(*args: object, name: str = "tiny.gguf", **options: object) -> Path:
        path = tmp_path / name
        path.write_bytes(gguf_bytes(*args, **options))
        return path

    return write


def f32(name: str, array: object) -> TensorLine:
    values = np.asarray(array, np.float32)
    return name, values.shape, 0, values.tobytes()


@pytest.fixture(scope="session")
def tiny_llama() -> tuple[dict[str, object], list[TensorLine]]:
    """Metadata and tensors of a whole one-layer model: 8 tokens, 2 heads of 4 that share one of keys and values."""
    numbers = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return numbers.standard_normal(shape, dtype=np.float32)

    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 16,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "</s>", "Ġ"],
        "tokenizer.ggml.token_type": np.array([3, 3, 3, 1, 1, 1, 1, 1], np.int32),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    tensors = [
        f32("token_embd.weight", weights(8, 8)),
        f32("blk.0.attn_norm.weight", weights(8)),
        f32("blk.0.attn_q.weight", weights(8, 8)),
        f32("blk.0.attn_k.weight", weights(4, 8)),
        f32("blk.0.attn_v.weight", weights(4, 8)),
        f32("blk.0.attn_output.weight", weights(8, 8)),
        f32("blk.0.ffn_norm.weight", weights(8)),
        f32("blk.0.ffn_gate.weight", weights(16, 8)),
        f32("blk.0.ffn_up.weight", weights(16, 8)),
        f32("blk.0.ffn_down.weight", weights(8, 16)),
        f32("output_norm.weight", weights(8)),
    ]
    return metadata, tensors
