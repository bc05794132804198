"""Each kernel against its plain float32 twin, on fresh random data at odd sizes."""

import threading

import pytest
import torch
from torch import Tensor

from bulletserve.kernels import reference
from bulletserve.kernels.attention import (
    decode_attention,
    decode_mask,
    gather_kv,
    page_index,
    prefill_attention,
    slot_index,
    write_kv,
)
from bulletserve.kernels.matmul import Projection, can_pack, gated_silu, linear, linear_add, pack
from bulletserve.kernels.norm import rms_norm
from bulletserve.kernels.rope import apply_rope

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def fresh_data() -> None:
    torch.set_num_threads(1)
    print("seed:", torch.seed())  # shown when a test fails


def close(actual: Tensor, expected: Tensor) -> None:
    """Within a few roundings of the dtype, relative to the size of the numbers."""
    exact = actual.dtype == torch.float32
    scale = float(expected.abs().max())
    torch.testing.assert_close(
        actual.float(), expected, atol=(2e-6 if exact else 1.6e-2) * scale, rtol=1e-5 if exact else 1.6e-2
    )


def random_cache(kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(41, 2, kv_heads, block_size, head_dim).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 37, 130])
def test_rms_norm(dtype: torch.dtype, rows: int) -> None:
    x, weight = (torch.randn(rows, 51) * 3).to(dtype), torch.randn(51).to(dtype)
    before = x.clone()
    close(rms_norm(x, weight, 1e-2), reference.rms_norm(x, weight, 1e-2))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 65])
def test_rms_norm_per_head(dtype: torch.dtype, rows: int) -> None:
    packed = torch.randn(rows, 7 * 12).to(dtype)
    heads, weight = packed.view(rows, 7, 12)[:, :5], torch.randn(5, 12).to(dtype)
    close(rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_turns_only_the_heads_it_is_given(dtype: torch.dtype) -> None:
    packed, angles = torch.randn(19, 7, 10).to(dtype), torch.randn(19, 5) * 30
    before = packed.clone()
    both = torch.cat((-angles, angles), dim=-1).unsqueeze(1)
    apply_rope(packed[:, :4], both.cos().to(dtype), both.sin().to(dtype))
    close(packed[:, :4], reference.rope(before[:, :4], angles))
    assert torch.equal(packed[:, 4:], before[:, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 17, 129])
@pytest.mark.parametrize(("inner", "outer"), [(51, 93), (96, 33)])
def test_linear(dtype: torch.dtype, rows: int, inner: int, outer: int) -> None:
    x, residual = torch.randn(rows, inner).to(dtype), torch.randn(rows, outer).to(dtype)
    weight, bias = torch.randn(outer, inner).to(dtype), torch.randn(outer).to(dtype)
    before = x.clone(), residual.clone()
    for b in (None, bias):
        expected = reference.linear(x, weight, b)
        for projection in (pack(weight, b), Projection(weight, b, packed=False)):
            close(linear(x, projection), expected)
            close(linear_add(x, projection, residual), expected + residual.float())
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_weights_are_packed_on_this_cpu() -> None:
    assert can_pack(torch.float32, torch.device("cpu"))
    assert pack(torch.randn(5, 7)).packed
    assert not can_pack(torch.float64, torch.device("cpu"))
    assert not can_pack(torch.bfloat16, torch.device("meta"))


def test_packed_weights_serve_two_threads_at_once() -> None:
    projections = [pack(torch.randn(192, 96)) for _ in range(8)]
    inputs = [torch.randn(rows, 96) for rows in (1, 70)]
    expected = [[linear(x, p) for p in projections] for x in inputs]
    wrong: list[int] = []

    def lane(which: int) -> None:
        torch.set_num_threads(1)
        for _ in range(200):
            for projection, right in zip(projections, expected[which], strict=True):
                if not torch.allclose(linear(inputs[which], projection), right, atol=1e-5):
                    wrong.append(which)

    lanes = [threading.Thread(target=lane, args=(which,)) for which in (0, 1)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_silu(dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 34).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    close(gated_silu(gate_up), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_fills_its_slots_and_nothing_else(dtype: torch.dtype) -> None:
    kv = random_cache(3, 6, 5, dtype)
    before = kv.clone()
    rows, slots = torch.randn(11, 6, 6).to(dtype), torch.randperm(41 * 5)[:11]
    write_kv(kv, rows, slot_index(slots, kv))
    for row, slot in zip(rows, slots.tolist(), strict=True):
        page = slot // 5
        assert torch.equal(kv[page, 0, :, slot % 5], row[:3])
        assert torch.equal(kv[page, 1, :, slot % 5], row[3:])
        before[page, :, :, slot % 5] = kv[page, :, :, slot % 5]
    assert torch.equal(kv, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 6, 150, 1000])
@pytest.mark.parametrize(("query_tokens", "context"), [(1, 1), (9, 9), (1, 23), (13, 50), (131, 131), (140, 203)])
def test_prefill_attention(dtype: torch.dtype, window: int | None, query_tokens: int, context: int) -> None:
    kv = random_cache(2, 12, 7, dtype)
    table = torch.randperm(41)[:30]
    q = torch.randn(query_tokens, 8, 12).to(dtype)[:, :6]
    k, v = (side[:, :context] for side in gather_kv(kv, page_index(table.unsqueeze(0), context, kv), 1))
    expected = reference.attention(q, kv, table, context - query_tokens, window)
    close(prefill_attention(q, k, v, window), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("lengths", [[1], [40], [3, 29], [12, 1, 7, 33, 33, 2, 8]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1)])
def test_decode_attention(
    dtype: torch.dtype, window: int | None, lengths: list[int], heads: int, kv_heads: int
) -> None:
    kv = random_cache(kv_heads, 10, 4, dtype)
    rows, longest = len(lengths), max(lengths)
    tables = torch.stack([torch.randperm(41)[:12] for _ in lengths])
    q = torch.randn(rows, heads + 2, 10).to(dtype)[:, :heads]
    k, v = gather_kv(kv, page_index(tables, longest, kv), rows)
    expected = torch.cat(
        [reference.attention(q[i : i + 1], kv, tables[i], length - 1, window) for i, length in enumerate(lengths)]
    )
    close(decode_attention(q, k, v, decode_mask(torch.tensor(lengths), longest, window, kv)), expected)
