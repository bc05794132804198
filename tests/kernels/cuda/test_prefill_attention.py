"""Prefill attention in Triton against the plain reference: ragged batches, prefixes, windows, poison, few SMs."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bulletserve.core.errors import ConfigError
from bulletserve.kernels import reference
from bulletserve.kernels.cuda.prefill_attention import PrefillSegments, prefill_attention

_NAN = float("nan")


@dataclass(frozen=True)
class _Batch:
    """A prefill batch over a cache in which every place that no sequence uses is NaN."""

    qkv: Tensor
    q: Tensor
    kv: Tensor
    tables: Tensor
    starts: list[int]
    context: list[int]
    seat: list[int]

    def expected(self, window: int | None) -> Tensor:
        """float32 [rows of all segments, heads * head_dim]."""
        parts = []
        for i, length in enumerate(self.context):
            rows = self.q[self.starts[i] : self.starts[i + 1]].cpu()
            table = self.tables[self.seat[i]].cpu()
            parts.append(reference.attention(rows, self.kv.cpu(), table, length - rows.shape[0], window))
        return torch.cat(parts)


def _batch(
    device: torch.device,
    new: list[int],
    context: list[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    padding: int = 3,
    dtype: torch.dtype = torch.float16,
) -> _Batch:
    query_heads, kv_heads = heads
    seats, max_blocks = len(new) + 3, -(-max(context) // block_size) + 2
    blocks = seats * max_blocks
    kv = torch.full((blocks, 2, kv_heads, block_size, head_dim), _NAN, dtype=dtype)
    tables = torch.randperm(blocks).view(seats, max_blocks).int()
    seat = torch.randperm(seats)[: len(new)].tolist()
    for row, length in zip(seat, context, strict=True):
        for position in range(length):
            page = kv[tables[row, position // block_size]]
            page[:, :, position % block_size] = torch.randn(2, kv_heads, head_dim)
    starts = [sum(new[:i]) for i in range(len(new) + 1)]
    qkv = torch.randn(starts[-1] + padding, (query_heads + 2 * kv_heads) * head_dim).to(dtype).to(device)
    q = qkv[:, : query_heads * head_dim].unflatten(1, (query_heads, head_dim))
    return _Batch(qkv, q, kv.to(device), tables.to(device), starts, context, seat)


def _segments(batch: _Batch, max_segments: int = 8) -> PrefillSegments:
    segments = PrefillSegments(max_segments, batch.q.device)
    segments.packed.fill_(10**6)  # whatever lies beyond the segments in use must not matter
    segments.stage(segments.host_buffer(), batch.starts, batch.context, batch.seat)
    return segments


def _check(batch: _Batch, segments: PrefillSegments, sms: int, window: int | None = None) -> None:
    out = torch.full((batch.q.shape[0], batch.q.shape[1] * batch.q.shape[2]), _NAN, dtype=batch.q.dtype)
    out = out.to(batch.q.device)
    prefill_attention(batch.q, batch.kv, batch.tables, segments, out, sms, window)
    expected = batch.expected(window)
    written = out[: batch.starts[-1]].float().cpu()
    error = float((written - expected).norm() / expected.norm())
    assert error < (4e-3 if batch.q.dtype == torch.float16 else 2e-2), error
    assert bool(out[batch.starts[-1] :].isnan().all()), "padding rows were written"
    assert segments.tickets.tolist() == [0, 0]


@pytest.mark.parametrize("sms", [1, 3, 17])
def test_segments_of_odd_lengths_with_and_without_prefix(device: torch.device, sms: int) -> None:
    torch.manual_seed(sms)
    batch = _batch(device, new=[1, 37, 70, 5], context=[90, 37, 101, 5])
    _check(batch, _segments(batch), sms)


@pytest.mark.parametrize("window", [1, 7, 64, 100, 1000])
def test_window(device: torch.device, window: int) -> None:
    torch.manual_seed(window)
    batch = _batch(device, new=[75, 9], context=[75, 150])
    _check(batch, _segments(batch), 2, window)


@pytest.mark.parametrize(
    ("heads", "head_dim"), [((4, 4), 64), ((7, 1), 64), ((6, 2), 96), ((2, 1), 128), ((16, 1), 64)]
)
def test_head_shapes(device: torch.device, heads: tuple[int, int], head_dim: int) -> None:
    batch = _batch(device, new=[41, 2], context=[60, 30], heads=heads, head_dim=head_dim)
    _check(batch, _segments(batch), 3)


@pytest.mark.parametrize("block_size", [1, 4, 128])
def test_block_sizes(device: torch.device, block_size: int) -> None:
    batch = _batch(device, new=[33], context=[70], block_size=block_size)
    _check(batch, _segments(batch), 2)


def test_wide_tiles(device: torch.device) -> None:
    batch = _batch(device, new=[140, 20], context=[140, 200], heads=(4, 1))
    _check(batch, _segments(batch), 1)
    _check(batch, _segments(batch), 1, window=50)


def test_blocks_before_the_window_may_be_gone(device: torch.device) -> None:
    batch = _batch(device, new=[20], context=[150])
    gone = (150 - 20 - 40) // 16  # blocks of which no query sees a token
    batch.kv[batch.tables[batch.seat[0], :gone].long()] = _NAN
    _check(batch, _segments(batch), 2, window=40)


def test_segments_change_between_launches(device: torch.device) -> None:
    first = _batch(device, new=[30, 12], context=[44, 12])
    segments = _segments(first, max_segments=2)
    _check(first, segments, 3)
    second = _batch(device, new=[8], context=[100])
    segments.stage(segments.host_buffer(), second.starts, second.context, second.seat)
    _check(second, segments, 3)


def test_no_segments_write_nothing(device: torch.device) -> None:
    batch = _batch(device, new=[5], context=[5])
    segments = PrefillSegments(4, device)
    out = torch.full((8, 256), _NAN, dtype=torch.float16, device=device)
    prefill_attention(batch.q, batch.kv, batch.tables, segments, out, 2)
    assert bool(out.isnan().all())


def test_large_scores(device: torch.device) -> None:
    batch = _batch(device, new=[50], context=[80])
    batch.q.mul_(30)
    _check(batch, _segments(batch), 2)


def test_shapes_that_the_kernel_does_not_have(device: torch.device) -> None:
    batch = _batch(device, new=[3], context=[3], block_size=16)
    out = torch.empty(6, 256, dtype=torch.float16, device=device)
    with pytest.raises(ConfigError, match="head dimensions"):
        prefill_attention(batch.q[..., :40], batch.kv, batch.tables, _segments(batch), out, 2)
    with pytest.raises(ConfigError, match="powers of two"):
        prefill_attention(batch.q, batch.kv[:, :, :, :12], batch.tables, _segments(batch), out, 2)
    with pytest.raises(ConfigError, match="segments"):
        PrefillSegments(1000, device)
    with pytest.raises(ConfigError, match="made for 1"):
        PrefillSegments(1, device).stage(torch.zeros(5, dtype=torch.int32), [0, 1, 2], [1, 1], [0, 1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter has no bfloat16 products")
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_bfloat16(device: torch.device, head_dim: int) -> None:
    batch = _batch(device, new=[30, 140], context=[50, 200], heads=(4, 1), head_dim=head_dim, dtype=torch.bfloat16)
    for sms in (2, 100):  # few SMs get wide tiles
        _check(batch, _segments(batch), sms)
    _check(batch, _segments(batch), 2, window=130)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
def test_one_graph_serves_changing_segments() -> None:
    device = torch.device("cuda")
    batch = _batch(device, new=[100, 28], context=[300, 28], heads=(8, 2), head_dim=128, padding=0)
    segments = _segments(batch)
    out = torch.zeros(128, 1024, dtype=torch.float16, device=device)
    prefill_attention(batch.q, batch.kv, batch.tables, segments, out, 40)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill_attention(batch.q, batch.kv, batch.tables, segments, out, 40)
    for starts, context in (([0, 100, 128], [300, 28]), ([0, 9, 36], [200, 27]), ([0, 77], [88])):
        other = _Batch(batch.qkv, batch.q, batch.kv, batch.tables, starts, context, batch.seat[: len(context)])
        segments.stage(segments.host_buffer(), starts, context, other.seat)
        out.fill_(_NAN)
        graph.replay()
        expected = other.expected(None)
        assert float((out[: starts[-1]].float().cpu() - expected).norm() / expected.norm()) < 4e-3
        assert bool(out[starts[-1] :].isnan().all())
