"""Each encoding against its definition in ggml, weight by weight, and against what the gguf package makes of it."""

import hashlib
import struct
from collections.abc import Callable

import numpy as np
import pytest

from bulletserve.formats.gguf_blocks import FORMATS, UNREAD, dequantise

F = np.float32


def half(block: bytes, at: int) -> np.float32:
    return F(struct.unpack_from("<e", block, at)[0])


def nibble(byte: int, high: bool) -> int:
    return byte >> 4 if high else byte & 15


def q4_0(b: bytes, i: int) -> np.float32:
    return F(nibble(b[2 + i % 16], i >= 16) - 8) * half(b, 0)


def q4_1(b: bytes, i: int) -> np.float32:
    return F(nibble(b[4 + i % 16], i >= 16)) * half(b, 0) + half(b, 2)


def q5_0(b: bytes, i: int) -> np.float32:
    fifth = int.from_bytes(b[2:6], "little") >> i & 1
    return F((nibble(b[6 + i % 16], i >= 16) | fifth << 4) - 16) * half(b, 0)


def q5_1(b: bytes, i: int) -> np.float32:
    fifth = int.from_bytes(b[4:8], "little") >> i & 1
    return F(nibble(b[8 + i % 16], i >= 16) | fifth << 4) * half(b, 0) + half(b, 2)


def q8_0(b: bytes, i: int) -> np.float32:
    return F(int.from_bytes(b[2 + i : 3 + i], signed=True)) * half(b, 0)


def scale_and_minimum(scales: bytes, j: int) -> tuple[int, int]:
    """ggml's get_scale_min_k4."""
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    scale = (scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4
    return scale, scales[j + 4] >> 4 | (scales[j] >> 6) << 4


def k_weight(b: bytes, i: int, q: int) -> np.float32:
    scale, minimum = scale_and_minimum(b[4:16], i // 32)
    return (half(b, 0) * F(scale)) * F(q) - half(b, 2) * F(minimum)


def q4_k(b: bytes, i: int) -> np.float32:
    pair, high = divmod(i // 32, 2)
    return k_weight(b, i, nibble(b[16 + 32 * pair + i % 32], bool(high)))


def q5_k(b: bytes, i: int) -> np.float32:
    pair, high = divmod(i // 32, 2)
    fifth = b[16 + i % 32] >> (i // 32) & 1
    return k_weight(b, i, nibble(b[48 + 32 * pair + i % 32], bool(high)) | fifth << 4)


def q6_k(b: bytes, i: int) -> np.float32:
    group, rest = divmod(i, 128)
    run, place = divmod(rest, 32)
    low = nibble(b[64 * group + 32 * (run % 2) + place], run >= 2)
    high = b[128 + 32 * group + place] >> (2 * run) & 3
    scale = int.from_bytes(b[192 + i // 16 : 193 + i // 16], signed=True)
    return (half(b, 208) * F(scale)) * F((low | high << 4) - 32)


# The definition, the bytes where half-precision factors lie, and the first 16 digits of the SHA-256 of what
# `gguf.quants.dequantize` of gguf 0.19.0 makes of `sample(name)`, as float32.
DEFINITIONS: dict[str, tuple[Callable[[bytes, int], np.float32], tuple[int, ...], str]] = {
    "Q4_0": (q4_0, (0,), "6f57fc9439791b63"),
    "Q4_1": (q4_1, (0, 2), "093a7d8f14d76fea"),
    "Q5_0": (q5_0, (0,), "bd4ab341b1123436"),
    "Q5_1": (q5_1, (0, 2), "1c10453ff45c6943"),
    "Q8_0": (q8_0, (0,), "a2437bb55e48ea83"),
    "Q4_K": (q4_k, (0, 2), "b52d7cd02b2acbe8"),
    "Q5_K": (q5_k, (0, 2), "1c6a7f7e98dc352c"),
    "Q6_K": (q6_k, (208,), "684d1aa067a9ab01"),
}
BY_NAME = {encoding.name: encoding for encoding in FORMATS.values()}


def sample(name: str, blocks: int = 40) -> bytes:
    """Arbitrary blocks, the same everywhere, whose factors are finite: the top bit of their exponents is cleared."""
    size = BY_NAME[name].block.itemsize
    raw = bytearray(hashlib.shake_128(name.encode()).digest(blocks * size))
    for start in range(0, len(raw), size):
        for at in DEFINITIONS[name][1]:
            raw[start + at + 1] &= 0b1011_1111
    return bytes(raw)


def decoded(name: str, raw: bytes) -> np.ndarray:
    return dequantise(np.frombuffer(raw, BY_NAME[name].block), BY_NAME[name])


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_weight_is_what_ggml_defines(name: str) -> None:
    raw, encoding = sample(name), BY_NAME[name]
    size = encoding.block.itemsize
    blocks = [raw[start : start + size] for start in range(0, len(raw), size)]
    expected = [DEFINITIONS[name][0](block, i) for block in blocks for i in range(encoding.weights)]
    result = decoded(name, raw)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, np.array(expected, np.float32))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_bits_equal_those_of_the_gguf_package(name: str) -> None:
    assert hashlib.sha256(decoded(name, sample(name)).tobytes()).hexdigest()[:16] == DEFINITIONS[name][2]


def test_passes_join_without_a_seam() -> None:
    """More blocks than one pass takes, and not a multiple."""
    raw = sample("Q4_1") * 500
    np.testing.assert_array_equal(decoded("Q4_1", raw), np.tile(decoded("Q4_1", sample("Q4_1")), 500))


def test_every_encoding_is_tested_here_or_is_plain() -> None:
    plain = {encoding.name for encoding in FORMATS.values() if encoding.decode is None}
    assert plain == {"F32", "F16", "BF16"}
    assert plain | DEFINITIONS.keys() == BY_NAME.keys()
    assert not UNREAD.keys() & FORMATS.keys()


def test_an_infinite_factor_passes_through_quietly() -> None:
    raw = struct.pack("<ee", np.inf, -np.inf) + bytes(range(16))
    assert np.isnan(decoded("Q4_1", raw)[0])
