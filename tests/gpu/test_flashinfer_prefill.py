"""FlashInfer's prefill kernel under our plan: against the plain reference and our own kernel, and never waiting."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from bulletserve.core.errors import ConfigError
from bulletserve.kernels import reference
from bulletserve.kernels.cuda.flashinfer_prefill import FlashInferPrefill, Ints, available, deal_tiles, list_works

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 8, 2, 128, 16
_NAN = float("nan")


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("sms", [1, 7, 100])
def test_tiles_are_dealt_evenly(sms: int) -> None:
    costs = np.sort(np.random.default_rng(sms).integers(300, 4000, 1000).astype(np.int32))[::-1]
    owner = deal_tiles(costs, sms)
    load = np.bincount(owner, weights=costs, minlength=sms)
    assert len(load) == sms
    assert load.max() - load.min() <= costs[0]
    assert load.max() <= 1.1 * load.mean()


def test_no_tiles_are_dealt() -> None:
    assert len(deal_tiles(_ints([]), 4)) == 0


@pytest.mark.parametrize("sms", [1, 5, 64])
def test_every_tile_of_every_head_is_listed_once(sms: int) -> None:
    starts, context, keys_at = _ints([0, 128, 385, 386]), _ints([128, 900, 1]), _ints([5, 0, 70])
    works, counts = list_works(starts, context, keys_at, heads=3, tile=128, sms=sms)
    tiles = [(0, 0), (0, 1), (1, 1), (2, 1), (0, 2)]
    listed = list(zip(works[0].tolist(), works[6].tolist(), works[5].tolist(), strict=True))
    assert sorted(listed) == sorted((tile, segment, head) for tile, segment in tiles for head in range(3))
    for i, values in ((1, starts), (2, keys_at), (3, np.diff(starts)), (4, context)):
        assert works[i].tolist() == [values[segment] for segment in works[6]]
    assert len(counts) == sms
    assert counts.sum() == 15
    last = np.minimum(works[4] - works[3] + (works[0] + 1) * 128, works[4])  # the last key of each tile
    for keys in np.split(last, np.cumsum(counts)[:-1]):
        assert (np.diff(keys) <= 0).all(), "the longest tile first"


@dataclass(frozen=True)
class _Batch:
    q: Tensor
    k: Tensor
    v: Tensor
    kv: Tensor
    tables: Tensor
    starts: Ints
    context: Ints
    seat: Ints

    def expected(self) -> Tensor:
        parts = []
        for i, length in enumerate(self.context):
            rows = self.q[self.starts[i] : self.starts[i + 1]].cpu()
            table = self.tables[int(self.seat[i])].cpu()
            parts.append(reference.attention(rows, self.kv.cpu(), table, int(length) - rows.shape[0]))
        return torch.cat(parts)


def _batch(new: list[int], context: list[int], seats: int = 6, max_blocks: int = 30) -> _Batch:
    width = (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM
    qkv = torch.randn(sum(new), width, dtype=torch.bfloat16, device="cuda")
    blocks = seats * max_blocks
    kv = torch.full((blocks, 2, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM), _NAN, dtype=torch.bfloat16)
    tables = torch.randperm(blocks).view(seats, max_blocks).int()
    seat = torch.randperm(seats)[: len(new)].tolist()
    for row, length in zip(seat, context, strict=True):
        for position in range(length):
            page = kv[tables[row, position // _BLOCK_SIZE]]
            page[:, :, position % _BLOCK_SIZE] = torch.randn(2, _KV_HEADS, _HEAD_DIM)
    starts = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
    q, k, v = qkv.unflatten(1, (-1, _HEAD_DIM)).split([_HEADS, _KV_HEADS, _KV_HEADS], dim=1)
    for i, row in enumerate(seat):
        for j, position in enumerate(range(context[i] - new[i], context[i])):
            page = kv[tables[row, position // _BLOCK_SIZE]]
            page[0, :, position % _BLOCK_SIZE] = k[starts[i] + j].cpu()
            page[1, :, position % _BLOCK_SIZE] = v[starts[i] + j].cpu()
    return _Batch(q, k, v, kv.cuda(), tables.cuda(), starts, _ints(context), _ints(seat))


def _error(out: Tensor, expected: Tensor) -> float:
    return float((out.float().cpu() - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def kernel() -> FlashInferPrefill:
    why = available(_HEAD_DIM, torch.bfloat16, None)
    if why is not None:
        pytest.skip(why)
    return FlashInferPrefill(_HEADS, _HEAD_DIM, torch.bfloat16, max_tokens=512, max_segments=4)


def _attend(kernel: FlashInferPrefill, batch: _Batch, sms: int) -> Tensor:
    out = torch.full((batch.q.shape[0], _HEADS * _HEAD_DIM), _NAN, dtype=torch.bfloat16, device="cuda")
    kernel.plan(batch.starts, batch.context, batch.seat, batch.tables.shape[1], sms, fresh=False)
    kernel.run(batch.q, batch.kv, batch.tables, out)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 20, 68, 132])
def test_segments_with_and_without_prefix(kernel: FlashInferPrefill, sms: int) -> None:
    batch = _batch(new=[1, 130, 77], context=[300, 130, 200])
    assert _error(_attend(kernel, batch, sms), batch.expected()) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [7, 100])
def test_fresh_prompts(kernel: FlashInferPrefill, sms: int) -> None:
    batch = _batch(new=[140, 1, 257], context=[140, 1, 257])
    out = torch.full((398, _HEADS * _HEAD_DIM), _NAN, dtype=torch.bfloat16, device="cuda")
    kernel.plan(batch.starts, batch.context, batch.seat, 0, sms, fresh=True)
    kernel.run_fresh(batch.q, batch.k, batch.v, out)
    assert _error(out, batch.expected()) < 5e-3
    assert _error(out, _attend(kernel, batch, sms).float().cpu()) < 5e-3


@pytest.mark.gpu
def test_equals_our_kernel(kernel: FlashInferPrefill) -> None:
    ours = pytest.importorskip("bulletserve.kernels.cuda.prefill_attention")
    batch = _batch(new=[256, 129], context=[420, 129])
    segments = ours.PrefillSegments(4, torch.device("cuda"))
    segments.stage(segments.host_buffer(), batch.starts, batch.context, batch.seat)
    out = torch.empty(385, _HEADS * _HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    ours.prefill_attention(batch.q, batch.kv, batch.tables, segments, out, 100)
    assert _error(_attend(kernel, batch, 100), out.float().cpu()) < 5e-3


@pytest.mark.gpu
def test_plans_made_ahead_do_not_disturb_runs_under_way(kernel: FlashInferPrefill) -> None:
    batches = [_batch(new=[3 + 30 * i, 20], context=[90 + 30 * i, 60 + i]) for i in range(5)]
    torch.cuda._sleep(200_000_000)  # the stream is busy while all five are planned and issued
    outs = [_attend(kernel, batch, 100) for batch in batches[:2]]
    assert not torch.cuda.current_stream().query(), "planning waited for the device"
    outs += [_attend(kernel, batch, 36) for batch in batches[2:]]
    for out, batch in zip(outs, batches, strict=True):
        assert _error(out, batch.expected()) < 5e-3


@pytest.mark.gpu
def test_a_graph_follows_the_plan(kernel: FlashInferPrefill) -> None:
    batch = _batch(new=[128, 40], context=[350, 40])
    out = torch.empty(168, _HEADS * _HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    kernel.plan(batch.starts, batch.context, batch.seat, batch.tables.shape[1], 132, fresh=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(batch.q, batch.kv, batch.tables, out)
    for starts, context in (([0, 128, 168], [350, 40]), ([0, 9], [128])):
        other = _Batch(
            batch.q, batch.k, batch.v, batch.kv, batch.tables, _ints(starts), _ints(context), batch.seat[: len(context)]
        )
        out.fill_(_NAN)
        kernel.plan(other.starts, other.context, other.seat, batch.tables.shape[1], 60, fresh=False)
        graph.replay()
        assert _error(out[: starts[-1]], other.expected()) < 5e-3
        assert bool(out[starts[-1] :].isnan().all())


@pytest.mark.gpu
def test_a_batch_that_is_too_large(kernel: FlashInferPrefill) -> None:
    with pytest.raises(ConfigError, match="512"):
        kernel.plan(_ints([0, 513]), _ints([513]), _ints([0]), 30, 132, fresh=True)


@pytest.mark.gpu
def test_what_the_library_cannot_do(kernel: FlashInferPrefill) -> None:
    assert "head dimension" in str(available(96, torch.bfloat16, None))
    assert "window" in str(available(128, torch.bfloat16, 100))
    assert "compute" in str(available(128, torch.float32, None))
