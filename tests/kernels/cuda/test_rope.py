"""Rotation, norms of heads and cache writes in one launch."""

import pytest
import torch

from bulletserve.core.errors import ConfigError
from bulletserve.kernels import reference
from bulletserve.kernels.cuda.rope import rope_table, rope_write

CONTEXT = 512


def frequencies(head_dim: int) -> torch.Tensor:
    return 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "norm"),
    [(4, 2, 64, 16, False), (9, 3, 64, 8, True), (6, 1, 96, 1, True), (32, 8, 128, 16, False), (3, 3, 8, 4, True)],
)
def test_rope_write(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, block_size: int, norm: bool, dtype: torch.dtype
) -> None:
    tokens, blocks, eps = 5, 7, 1e-6
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(tokens, width).to(dtype).to(device)
    before = qkv.clone()
    kv = torch.full((blocks, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype, device=device)
    weight = (1 + 0.3 * torch.randn(heads + kv_heads, head_dim)).to(dtype).to(device) if norm else None
    positions = torch.randint(0, CONTEXT, (tokens,), dtype=torch.int32)
    slots = torch.randperm(blocks * block_size)[:tokens]
    slots[2] = -1
    table = rope_table(frequencies(head_dim), CONTEXT).to(device)
    rope_write(qkv, positions.to(device), slots.to(device), table, kv, heads, kv_heads, weight, eps)

    packed = before.float().cpu().view(tokens, heads + 2 * kv_heads, head_dim)
    turned = packed[:, : heads + kv_heads]
    if weight is not None:
        turned = reference.rms_norm(turned, weight.cpu(), eps)
    turned = reference.rope(turned, positions.unsqueeze(1).float() * frequencies(head_dim))
    near = {torch.bfloat16: 0.04, torch.float16: 5e-3, torch.float32: 2e-4}[dtype]
    for t in range(tokens):
        if slots[t] < 0:
            assert torch.equal(qkv[t], before[t])
            continue
        q = qkv[t].float().cpu().view(-1, head_dim)
        torch.testing.assert_close(q[: heads + kv_heads], turned[t], atol=near, rtol=near)
        assert torch.equal(q[heads + kv_heads :], packed[t, heads + kv_heads :])
        page = kv[slots[t] // block_size, :, :, slots[t] % block_size].cpu()
        assert torch.equal(page[0].float(), q[heads : heads + kv_heads])
        assert torch.equal(page[1].float(), packed[t, heads + kv_heads :])
    written = ~kv.isnan().all(dim=-1).all(dim=2).all(dim=1)
    assert int(written.sum()) == tokens - 1


def test_rounding_is_that_of_transformers(device: torch.device) -> None:
    heads, head_dim, tokens = 4, 64, 9
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # Triton's interpreter truncates to bfloat16
    qkv = torch.randn(tokens, 6 * head_dim).to(dtype)
    positions = torch.randint(0, CONTEXT, (tokens,), dtype=torch.int32)
    table = rope_table(frequencies(head_dim), CONTEXT)
    cos, sin = table[positions.long()].chunk(2, dim=1)
    cos, sin = (x.repeat(1, 2).unsqueeze(1).to(dtype) for x in (cos, sin))
    packed = qkv.view(tokens, 6, head_dim)
    half = torch.cat((-packed[..., head_dim // 2 :], packed[..., : head_dim // 2]), dim=-1)
    expected = packed * cos + half * sin
    kv = torch.empty(3, 2, 1, 4, head_dim, dtype=dtype, device=device)
    out = qkv.to(device)
    rope_write(out, positions.to(device), torch.arange(tokens).to(device), table.to(device), kv, heads, 1)
    assert torch.equal(out.cpu().view(tokens, 6, head_dim)[:, : heads + 1], expected[:, : heads + 1])


def test_table_is_exact_far_out() -> None:
    table = rope_table(frequencies(64), 100_001)
    angle = 99_999 * frequencies(64).double()
    assert table.dtype == torch.float32
    assert torch.equal(table[99_999], torch.cat((angle.cos(), angle.sin())).float())


def test_block_size_must_be_a_power_of_two(device: torch.device) -> None:
    x = torch.zeros(1, 3 * 8, device=device)
    with pytest.raises(ConfigError, match="power of two"):
        rope_write(x, x, x, x, torch.zeros(1, 2, 1, 12, 8, device=device), 1, 1)
