"""What happens to the packed q, k and v of a step before attention: norms of heads, rotation, the cache.

Knows nothing about requests; `slots` say where in the cache a token goes. One pass over the rows: read once, q
and k written back in place, k and v written to their page. Dimension i of a head turns with dimension i + D/2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bulletserve.core.errors import ConfigError

_HEADS = 8  # of one program


def rope_table(inverse_frequencies: Tensor, max_positions: int) -> Tensor:
    """Float32 [max_positions, D]: cosines of `inverse_frequencies` [D / 2] x position, then sines.

    Angles are made in float64: at position 100,000 a float32 angle is off by up to 0.004 radians.
    """
    frequencies = inverse_frequencies.to(torch.float64)
    positions = torch.arange(max_positions, dtype=torch.float64, device=frequencies.device)
    angles = positions.unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(torch.float32)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _normalised_halves(first, second, weight, mask, width: tl.constexpr, eps, dtype: tl.constexpr):
    half: tl.constexpr = width // 2
    squares = tl.sum(first * first, axis=1, keep_dims=True) + tl.sum(second * second, axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / width + eps)
    left = tl.load(weight, mask, 0.0).to(tl.float32)
    right = tl.load(weight + half, mask, 0.0).to(tl.float32)
    return (
        _rounded(_rounded(first * scale, dtype) * left, dtype),
        _rounded(_rounded(second * scale, dtype) * right, dtype),
    )


@triton.jit
def _rope_write(
    qkv,
    positions,
    slots,
    table,
    kv,
    qk_norm,
    eps,
    page_stride,
    num_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    heads_block: tl.constexpr,
    half_block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    half: tl.constexpr = head_dim // 2
    dtype: tl.constexpr = qkv.dtype.element_ty
    head = (tl.program_id(1) * heads_block + tl.arange(0, heads_block))[:, None]
    dim = tl.arange(0, half_block)[None, :]
    mask = (head < num_heads + 2 * kv_heads) & (dim < half)
    turns = head < num_heads + kv_heads  # q and k
    row = qkv + token * ((num_heads + 2 * kv_heads) * head_dim) + head * head_dim + dim
    first = tl.load(row, mask, 0.0).to(tl.float32)
    second = tl.load(row + half, mask, 0.0).to(tl.float32)
    raw_first, raw_second = first, second
    if qk_norm is not None:
        weight = qk_norm + head * head_dim + dim
        first, second = _normalised_halves(first, second, weight, mask & turns, head_dim, eps, dtype)
    angle = table + tl.load(positions + token).to(tl.int64) * head_dim + dim
    # Rounded where transformers rounds: the table, each product, the sum.
    cos = _rounded(tl.load(angle, dim < half, 0.0), dtype)
    sin = _rounded(tl.load(angle + half, dim < half, 0.0), dtype)
    turned_first = (_rounded(first * cos, dtype) - _rounded(second * sin, dtype)).to(dtype)
    turned_second = (_rounded(second * cos, dtype) + _rounded(first * sin, dtype)).to(dtype)
    tl.store(row, turned_first, mask & turns)
    tl.store(row + half, turned_second, mask & turns)
    # Heads num_heads .. num_heads + 2 * kv_heads are a page's planes in order: K's heads, then V's.
    plane = (head - num_heads).to(tl.int64) * block_size + slot % block_size
    place = kv + (slot // block_size) * page_stride + plane * head_dim + dim
    written = mask & (head >= num_heads)
    tl.store(place, tl.where(turns, turned_first, raw_first.to(dtype)), written)
    tl.store(place + half, tl.where(turns, turned_second, raw_second.to(dtype)), written)


def rope_write(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    kv: Tensor,
    num_heads: int,
    kv_heads: int,
    qk_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Normalises (where `qk_norm` is given) and rotates q and k, and writes k and v to the cache.

    `qkv` [T, (num_heads + 2 * kv_heads) * D] contiguous: q's and k's parts are overwritten, v's is only read.
    `positions` int32 [T], `table` as `rope_table` makes it, `kv` [blocks, 2, kv_heads, block_size, D] (pages
    contiguous), `slots` int64 [T]: block * block_size + offset; a negative slot is padding, and its row is left
    alone. `qk_norm` [num_heads + kv_heads, D]: RMSNorm weights of each head of q, then k.
    Raises ConfigError if block_size is no power of two.
    """
    tokens = qkv.shape[0]
    block_size, head_dim = kv.shape[3], kv.shape[4]
    if block_size & (block_size - 1):
        raise ConfigError(f"block size {block_size} is no power of two")
    if not tokens:
        return
    # A fused multiply-add would skip the rounding of a product.
    grid = (tokens, triton.cdiv(num_heads + 2 * kv_heads, _HEADS))
    half_block = triton.next_power_of_2(head_dim // 2)
    _rope_write[grid](
        qkv, positions, slots, table, kv, qk_norm, eps, kv.stride(0),
        num_heads, kv_heads, head_dim, block_size, _HEADS, half_block, num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
