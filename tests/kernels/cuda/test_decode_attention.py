"""Decode attention against the plain reference: every cut of the work between programs gives the same numbers."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bulletserve.core.errors import ConfigError
from bulletserve.kernels import reference

decode_attention = pytest.importorskip("bulletserve.kernels.cuda.decode_attention")

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """A decode batch: `contexts` counts each row's own token; K and V grow with the token, by `growth` each."""

    contexts: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    padding: int = 0
    first_row: int = 0
    sms: int = 2
    dtype: torch.dtype = torch.float32
    growth: float = 0.0


@dataclass(frozen=True)
class Batch:
    """Everything on the device; `expected` [live, heads * head_dim] in float32."""

    qkv: Tensor
    q: Tensor
    kv: Tensor
    tables: Tensor
    lengths: Tensor
    rows: Tensor
    live: Tensor
    first_row: Tensor
    expected: Tensor


def make_batch(case: Case, device: torch.device, seed: int = 0) -> Batch:
    """A random batch in which all that no row may read is NaN, and every page id that no row owns is absurd."""
    random = torch.Generator().manual_seed(seed)
    live, size = len(case.contexts), case.block_size
    blocks = [-(-context // size) for context in case.contexts]
    tables = torch.full((live + case.padding + 2, max(blocks) + 3), 2**30, dtype=torch.int32)
    lengths = torch.full((live + case.padding + 2,), 10**6, dtype=torch.int32)
    kv = torch.full((sum(blocks) + 3, 2, case.kv_heads, size, case.head_dim), NAN, dtype=case.dtype)
    page = torch.randperm(len(kv), generator=random).tolist()
    seats = torch.randperm(live + 1, generator=random)[:live].tolist()
    for seat, context, count in zip(seats, case.contexts, blocks, strict=True):
        own = [page.pop() for _ in range(count)]
        tables[seat, :count] = torch.tensor(own, dtype=torch.int32)
        lengths[seat] = context - 1
        start = 0 if case.window is None else max(0, context - case.window)
        for token in range(start, context):
            place = torch.randn(2, case.kv_heads, case.head_dim, generator=random) * (1 + case.growth * token)
            kv[own[token // size], :, :, token % size] = place.to(case.dtype)
    rows = torch.tensor(seats + [live + case.padding + 1] * case.padding, dtype=torch.int32)
    tokens = case.first_row + live + case.padding
    qkv = torch.randn(tokens, case.heads + 2 * case.kv_heads, case.head_dim, generator=random).to(case.dtype)
    expected = [
        reference.attention(qkv[r : r + 1, : case.heads], kv, tables[seat], context - 1, case.window)
        for r, seat, context in zip(range(case.first_row, tokens), seats, case.contexts, strict=False)
    ]
    qkv, kv, tables, lengths, rows = (x.to(device) for x in (qkv, kv, tables, lengths, rows))
    scalar = torch.tensor([live, case.first_row], dtype=torch.int32, device=device)
    q = qkv[:, : case.heads]
    return Batch(qkv, q, kv, tables, lengths, rows, scalar[:1], scalar[1:], torch.cat(expected))


def make_attention(case: Case, device: torch.device) -> "decode_attention.DecodeAttention":
    return decode_attention.DecodeAttention(
        max_rows=len(case.contexts) + case.padding,
        num_heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        max_sms=max(case.sms, 8),
        device=device,
        window=case.window,
    )


def run(case: Case, batch: Batch, attention: "decode_attention.DecodeAttention") -> Tensor:
    """What the kernel wrote, [tokens, heads * head_dim], NaN where it wrote nothing."""
    out = torch.full((len(batch.qkv), case.heads * case.head_dim), NAN, dtype=case.dtype, device=batch.kv.device)
    attention.schedule(batch.rows, batch.lengths, batch.live, batch.first_row, case.sms)
    attention.run(batch.q, batch.kv, batch.tables, out)
    return out


def check(case: Case, device: torch.device) -> None:
    batch = make_batch(case, device)
    out = run(case, batch, make_attention(case, device))
    ours = out[case.first_row : case.first_row + len(case.contexts)].float().cpu()
    error = (ours - batch.expected).norm() / batch.expected.norm()
    # float32 products go through tf32 on a GPU; bfloat16 rounds the weights of the values.
    assert error < (1e-2 if case.dtype == torch.bfloat16 else 2e-3)
    assert out[: case.first_row].isnan().all()
    assert out[case.first_row + len(case.contexts) :].isnan().all()


@pytest.mark.parametrize("contexts", [(1,), (16, 17), (31, 32, 33), (64,), (65, 63), (128, 1, 129), (200, 3, 77, 1)])
def test_lengths_at_the_edges_of_blocks_and_tiles(contexts: tuple[int, ...], device: torch.device) -> None:
    check(Case(contexts), device)


@pytest.mark.parametrize("heads,kv_heads", [(2, 2), (3, 1), (8, 2), (8, 1), (16, 1), (5, 1)])
def test_every_group_size(heads: int, kv_heads: int, device: torch.device) -> None:
    check(Case((70, 9), heads=heads, kv_heads=kv_heads), device)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("block_size", [1, 8, 256])
def test_head_dims_and_block_sizes(head_dim: int, block_size: int, device: torch.device) -> None:
    check(Case((130, 21), head_dim=head_dim, block_size=block_size), device)


@pytest.mark.parametrize("window", [1, 16, 50, 64, 65, 1000])
def test_a_window_is_respected(window: int, device: torch.device) -> None:
    check(Case((150, 64, 7), window=window), device)


@pytest.mark.parametrize("sms", [1, 2, 3, 7, 33])
def test_few_programs_for_much_work_and_many_for_little(sms: int, device: torch.device) -> None:
    check(Case((400, 1, 100, 65), sms=sms), device)


def test_padding_and_rows_of_a_chunk_before_are_left_alone(device: torch.device) -> None:
    check(Case((90, 20, 64), padding=5, first_row=7), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 matrices by their bit patterns")
    check(Case((300, 31), heads=8, head_dim=128, sms=3, dtype=dtype), device)


@pytest.mark.parametrize("growth", [0.05, 0.5, -0.005])
def test_products_that_exceed_all_before_or_fade(growth: float, device: torch.device) -> None:
    check(Case((320, 96, 200), heads=8, head_dim=128, sms=1, dtype=torch.float16, growth=growth), device)


def test_no_live_row_is_no_work(device: torch.device) -> None:
    case = Case((40, 3))
    batch = make_batch(case, device)
    batch.live.zero_()
    assert run(case, batch, make_attention(case, device)).isnan().all()


def test_the_same_scratch_serves_one_step_after_another_bit_for_bit(device: torch.device) -> None:
    case = Case((300, 65, 10), sms=5)
    attention = make_attention(case, device)
    first, second = make_batch(case, device, seed=1), make_batch(case, device, seed=2)
    once = run(case, first, attention)
    run(case, second, attention)
    assert torch.equal(run(case, first, attention), once)


def test_impossible_shapes_are_refused(device: torch.device) -> None:
    for case in (Case((1,), heads=5), Case((1,), heads=64), Case((1,), block_size=24)):
        with pytest.raises(ConfigError):
            make_attention(case, device)
