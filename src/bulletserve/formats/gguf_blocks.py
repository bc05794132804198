"""The element encodings of GGUF tensors, and how each becomes float32.

Knows nothing about files. A quantised row is cut into blocks of 32 or 256 weights. A block holds small
integers q and what turns them back into weights: w = d * q, or w = d * q + m, with d and m in half
precision. The K formats put eight or sixteen sub-blocks under one d and give each its own small scale. The
layouts are those of ggml (`ggml-common.h`, `dequantize_row_*` in `ggml-quants.c`), little endian;
arithmetic is float32 in ggml's order, so results are equal to its bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bulletserve.formats.description import Array

Floats = NDArray[np.float32]

_BLOCKS_AT_ONCE = 8192  # output of a pass stays in the L2 cache: 1 MiB for blocks of 32


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One ggml type. `weights` per block of `block.itemsize` bytes; `dtype` is the tag of the array it
    becomes.

    `decode` fills float32 [blocks, weights] from an array of `block`; None where the bytes are the values
    already.
    """

    name: str
    weights: int
    block: np.dtype[Any]
    decode: Callable[[Array, Floats], None] | None
    dtype: str = "float32"


def dequantise(blocks: Array, encoding: BlockFormat) -> Array:
    """Weights, flat: fresh float32, or `blocks` itself (a view of the file) where nothing is encoded."""
    if encoding.decode is None:
        return blocks
    out = np.empty((len(blocks), encoding.weights), np.float32)
    with np.errstate(all="ignore"):  # a scale may be infinite in a damaged file: not worth a warning per pass
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            stop = start + _BLOCKS_AT_ONCE
            encoding.decode(blocks[start:stop], out[start:stop])
    return out.reshape(-1)


def _column(values: Array) -> Floats:
    """One factor per block, shaped to multiply [blocks, weights]."""
    return values.astype(np.float32)[:, None]


def _nibbles(packed: Array, out: Floats) -> None:
    """Bytes [blocks, n] to integers [blocks, 2n]: the low halves of all bytes first, then the high halves."""
    half = packed.shape[1]
    out[:, :half] = packed & 15
    out[:, half:] = packed >> 4


def _fifth_bits(words: Array, out: Floats) -> None:
    """Add 16 to weight j of each block where bit j of its 32-bit word is set."""
    out += ((words[:, None] >> np.arange(32, dtype=np.uint32)) & 1) << 4


def _q4_0(blocks: Array, out: Floats) -> None:
    _nibbles(blocks["q"], out)
    out -= 8
    out *= _column(blocks["d"])


def _q4_1(blocks: Array, out: Floats) -> None:
    _nibbles(blocks["q"], out)
    out *= _column(blocks["d"])
    out += _column(blocks["m"])


def _q5_0(blocks: Array, out: Floats) -> None:
    _nibbles(blocks["q"], out)
    _fifth_bits(blocks["high"], out)
    out -= 16
    out *= _column(blocks["d"])


def _q5_1(blocks: Array, out: Floats) -> None:
    _nibbles(blocks["q"], out)
    _fifth_bits(blocks["high"], out)
    out *= _column(blocks["d"])
    out += _column(blocks["m"])


def _q8_0(blocks: Array, out: Floats) -> None:
    np.multiply(blocks["q"], _column(blocks["d"]), out=out)


def _scale_sub_blocks(blocks: Array, out: Floats) -> None:
    """w = (d * scale) * q - (dmin * minimum), in place, for the eight sub-blocks of Q4_K and Q5_K.

    Scales and minima have six bits each, packed in twelve bytes: bytes 0-3 hold the scales 0-3 in their low
    six bits, bytes 4-7 the minima 0-3; the low and high halves of bytes 8-11 are the low four bits of
    scales and minima 4-7, whose top two bits are the top two bits of bytes 0-3 and 4-7.
    """
    packed = blocks["scales"]
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    sub_blocks = out.reshape(-1, 8, 32)
    sub_blocks *= (_column(blocks["d"]) * scales)[:, :, None]
    sub_blocks -= (_column(blocks["dmin"]) * minima)[:, :, None]


def _k_nibbles(packed: Array, out: Floats) -> None:
    """128 bytes to 256 integers: 32 bytes hold a sub-block in their low halves, the next in their high."""
    runs, pairs = packed.reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32)
    pairs[:, :, 0] = runs & 15
    pairs[:, :, 1] = runs >> 4


def _q4_k(blocks: Array, out: Floats) -> None:
    _k_nibbles(blocks["q"], out)
    _scale_sub_blocks(blocks, out)


def _q5_k(blocks: Array, out: Floats) -> None:
    _k_nibbles(blocks["q"], out)
    sub_blocks = out.reshape(-1, 8, 32)
    for index in range(8):  # bit i of byte j is the fifth bit of weight j in sub-block i
        sub_blocks[:, index] += ((blocks["high"] >> index) & 1) << 4
    _scale_sub_blocks(blocks, out)


def _q6_k(blocks: Array, out: Floats) -> None:
    halves = out.reshape(-1, 2, 4, 32)  # two halves of 128 weights, each four runs of 32
    low, high = blocks["q"].reshape(-1, 2, 2, 32), blocks["high"].reshape(-1, 2, 32)
    for run in range(4):
        # runs 0 and 1 are the low halves of the two rows of bytes, runs 2 and 3 the high ones
        halves[:, :, run] = (low[:, :, run % 2] >> (run // 2 * 4)) & 15
        halves[:, :, run] += ((high >> (2 * run)) & 3) << 4
    out -= 32
    out.reshape(-1, 16, 16)[...] *= (_column(blocks["d"]) * blocks["scales"])[:, :, None]


def _quantised(
    name: str,
    weights: int,
    layout: list[tuple[str, str] | tuple[str, str, int]],
    decode: Callable[[Array, Floats], None],
) -> BlockFormat:
    return BlockFormat(name, weights, np.dtype(layout), decode)


FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, np.dtype("<f4"), None),
    1: BlockFormat("F16", 1, np.dtype("<f2"), None, "float16"),
    2: _quantised("Q4_0", 32, [("d", "<f2"), ("q", "u1", 16)], _q4_0),
    3: _quantised("Q4_1", 32, [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)], _q4_1),
    6: _quantised("Q5_0", 32, [("d", "<f2"), ("high", "<u4"), ("q", "u1", 16)], _q5_0),
    7: _quantised("Q5_1", 32, [("d", "<f2"), ("m", "<f2"), ("high", "<u4"), ("q", "u1", 16)], _q5_1),
    8: _quantised("Q8_0", 32, [("d", "<f2"), ("q", "i1", 32)], _q8_0),
    12: _quantised("Q4_K", 256, [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("q", "u1", 128)], _q4_k),
    13: _quantised(
        "Q5_K",
        256,
        [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)],
        _q5_k,
    ),
    14: _quantised("Q6_K", 256, [("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")], _q6_k),
    30: BlockFormat("BF16", 1, np.dtype("<u2"), None, "bfloat16"),
}
"""The encodings we read, by ggml's type number."""

UNREAD = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Names of the types ggml has and we do not read, for the refusal."""
