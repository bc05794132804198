"""FlashInfer's decode kernel under our plan: against the plain reference, in a graph, and never touching other rows."""

import pytest
import torch
from torch import Tensor

from bulletserve.kernels import reference

flashinfer_decode = pytest.importorskip("bulletserve.kernels.cuda.flashinfer_decode")
pytestmark = pytest.mark.gpu

_HEAD_DIM, _BLOCK, _SEATS, _WIDTH = 128, 16, 12, 400
_NAN = float("nan")


class _Lane:
    """One lane's kernel and a cache of `layers` layers in which all that no row may read is NaN."""

    def __init__(self, heads: int = 32, kv_heads: int = 8, layers: int = 1, max_rows: int = 8) -> None:
        why = flashinfer_decode.available(heads, kv_heads, _HEAD_DIM, torch.bfloat16, None)
        if why is not None:
            pytest.skip(why)
        device = torch.device("cuda")
        self.heads, self.kv_heads = heads, kv_heads
        self.kernel = flashinfer_decode.FlashInferDecode(
            max_rows, heads, kv_heads, _HEAD_DIM, _BLOCK, 132, device, torch.bfloat16, (_SEATS, _WIDTH)
        )
        blocks = 1500
        shape = (layers, blocks, 2, kv_heads, _BLOCK, _HEAD_DIM)
        self.kv = torch.full(shape, _NAN, dtype=torch.bfloat16, device=device)
        self.free = torch.randperm(blocks - 1, device=device).int() + 1  # block 0 stays NaN
        self.tables = torch.zeros(_SEATS, _WIDTH, dtype=torch.int32, device=device)
        self.lengths = torch.full((_SEATS,), 10**6, dtype=torch.int32, device=device)
        self.rows = torch.full((max_rows,), _SEATS - 1, dtype=torch.int32, device=device)
        self.scalars = torch.zeros(2, dtype=torch.int32, device=device)
        self.live, self.first_row = self.scalars[:1], self.scalars[1:]
        self.contexts: list[int] = []

    def set(self, contexts: list[int], first_row: int = 0) -> None:
        """Give the rows these contexts, in blocks of their own."""
        self.contexts, at = contexts, 0
        self.kv.fill_(_NAN)
        for row, context in enumerate(contexts):
            seat, count = _SEATS - 2 - row, -(-context // _BLOCK)
            own = self.free[at : at + count]
            at += count
            self.tables[seat, :count] = own
            self.lengths[seat] = context - 1
            self.rows[row] = seat
            shape = (len(self.kv), count * _BLOCK, 2, self.kv_heads, _HEAD_DIM)
            values = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
            values[:, context:] = _NAN
            self.kv[:, own.long()] = values.unflatten(1, (count, _BLOCK)).permute(0, 1, 3, 4, 2, 5)
        self.scalars.copy_(torch.tensor([len(contexts), first_row]))

    def query(self, tokens: int) -> Tensor:
        """As a model has it: a view of Q, K and V side by side."""
        qkv = torch.randn(tokens, self.heads + 2 * self.kv_heads, _HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        return qkv[:, : self.heads]

    def out(self, tokens: int) -> Tensor:
        return torch.full((tokens, self.heads * _HEAD_DIM), _NAN, dtype=torch.bfloat16, device="cuda")

    def schedule(self, bucket: int, sms: int) -> None:
        self.kernel.schedule(self.rows[:bucket], self.lengths, self.live, self.first_row, sms)

    def run(self, q: Tensor, out: Tensor, layer: int = 0) -> None:
        self.kernel.run(q, self.kv[layer], self.tables, out)

    def check(self, q: Tensor, out: Tensor, first_row: int = 0, layer: int = 0) -> None:
        kv = self.kv[layer].cpu()
        for row, context in enumerate(self.contexts):
            table = self.tables[int(self.rows[row])].cpu()
            expected = reference.attention(q[first_row + row :][:1].cpu(), kv, table, context - 1, None).flatten()
            error = (out[first_row + row].float().cpu() - expected).norm() / expected.norm()
            assert error < 6e-3, (row, context, float(error))
        assert out[:first_row].isnan().all()
        assert out[first_row + len(self.contexts) :].isnan().all()


@pytest.mark.parametrize("sms", [2, 64, 132])
@pytest.mark.parametrize("contexts", [[1], [16, 17, 128, 129], [6000, 1, 300, 40], [700] * 8])
def test_against_the_reference(contexts: list[int], sms: int) -> None:
    lane = _Lane()
    lane.set(contexts)
    q, out = lane.query(len(contexts)), lane.out(len(contexts))
    lane.schedule(len(contexts), sms)
    lane.run(q, out)
    lane.check(q, out)


@pytest.mark.parametrize("heads,kv_heads", [(8, 8), (28, 4), (16, 1), (5, 1), (3, 1)])
def test_group_sizes(heads: int, kv_heads: int) -> None:
    lane = _Lane(heads, kv_heads)
    lane.set([1000, 70])
    q, out = lane.query(2), lane.out(2)
    lane.schedule(2, 40)
    lane.run(q, out)
    lane.check(q, out)


@pytest.mark.parametrize("first_row", [0, 1, 37])
def test_padding_and_rows_of_a_chunk_before_are_left_alone(first_row: int) -> None:
    lane = _Lane()
    lane.set([900, 33, 2500], first_row)
    q, out = lane.query(first_row + 8), lane.out(first_row + 8)
    lane.schedule(8, 132)
    lane.run(q, out)
    lane.check(q, out, first_row)


def test_one_graph_serves_steps_of_any_lengths_and_layers() -> None:
    lane = _Lane(layers=2)
    lane.set([5])
    q, outs = lane.query(8), [lane.out(8), lane.out(8)]

    def step() -> None:
        lane.schedule(8, 64)
        for layer, out in enumerate(outs):
            lane.run(q, out, layer)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for contexts in ([5], [6000, 200, 10], [300] * 8, [], [16]):
        lane.set(contexts)
        for out in outs:
            out.fill_(_NAN)
        graph.replay()
        for layer, out in enumerate(outs):
            lane.check(q, out, layer=layer)


def test_nothing_waits_for_the_device() -> None:
    lane = _Lane()
    lane.set([400, 20])
    q, out = lane.query(2), lane.out(2)
    lane.schedule(2, 132)
    lane.run(q, out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        lane.schedule(2, 100)
        lane.run(q, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    lane.check(q, out)
