"""The plan of FlashInfer's decode kernel, and the merging of its pieces; the library's own kernel is not run here."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bulletserve.kernels import reference

flashinfer_decode = pytest.importorskip("bulletserve.kernels.cuda.flashinfer_decode")

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """A decode batch: `contexts` counts each row's own token."""

    contexts: tuple[int, ...]
    kv_heads: int = 8
    block_size: int = 16
    tile: int = 128
    padding: int = 0
    first_row: int = 0
    sms: int = 8

    @property
    def bucket(self) -> int:
        return len(self.contexts) + self.padding


@dataclass(frozen=True)
class Planned:
    """A plan on the host. `seats` of the live rows; `pieces` [(first page entry, end, last page's tokens, query)]."""

    plan: "flashinfer_decode.DecodePlan"
    seats: list[int]
    width: int
    pieces: list[tuple[int, int, int, int]]
    parts: list[tuple[int, int]]
    first_row: Tensor

    def tokens(self, block_size: int) -> list[int]:
        return [(end - first - 1) * block_size + last for first, end, last, _ in self.pieces]


def make_plan(case: Case, device: torch.device, seed: int = 0) -> Planned:
    random = torch.Generator().manual_seed(seed)
    seats = torch.randperm(case.bucket + 2, generator=random)[: len(case.contexts)].tolist()
    width = max(case.contexts, default=1) // case.block_size + 3
    rows = torch.tensor(seats + [case.bucket + 2] * case.padding, dtype=torch.int32, device=device)
    lengths = torch.full((case.bucket + 3,), 10**6, dtype=torch.int32, device=device)
    for seat, context in zip(seats, case.contexts, strict=True):
        lengths[seat] = context - 1
    scalars = torch.tensor([len(case.contexts), case.first_row], dtype=torch.int32, device=device)
    plan = flashinfer_decode.DecodePlan(
        case.bucket + 3, case.kv_heads, case.tile, case.block_size, case.sms + 2, (case.bucket + 3, width), device
    )
    for array in (plan.pages[:-1], plan.queries, plan.last_page, plan.parts):
        array.fill_(-77)
    plan.make(rows, lengths, scalars[:1], scalars[1:], case.sms)
    used = int(plan.parts[: case.bucket, 1].sum())
    assert plan.valid[: plan.items].tolist() == [1] * used + [0] * (plan.items - used)
    pages, queries, last = (x.tolist() for x in (plan.pages, plan.queries, plan.last_page))
    pieces = [(pages[i], pages[i + 1], last[i], queries[i]) for i in range(0, 2 * plan.items, 2)]
    for i in range(0, 2 * plan.items, 2):
        assert queries[i + 1] - queries[i] == (pages[i + 1] > pages[i]), "one query row, or none without pages"
    assert pages[-1] == (case.bucket + 3) * width
    assert all(page == -77 for page in pages[2 * plan.items : -1])
    parts = [(begin, count) for begin, count in plan.parts.tolist()[: case.bucket]]
    return Planned(plan, seats, width, pieces, parts, scalars[1:])


@pytest.mark.parametrize("max_rows", [1, 3, 8, 40])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_there_is_room_for_every_batch_on_every_share(max_rows: int, kv_heads: int) -> None:
    most = flashinfer_decode.most_items(max_rows, kv_heads, 132)
    batches = [(rows, sms) for rows in range(1, max_rows + 1) for sms in range(1, 133)]
    assert most >= max(flashinfer_decode.count_items(rows, kv_heads, sms) for rows, sms in batches)


def check_cover(case: Case, planned: Planned) -> None:
    """Every token of every row is in one piece, and no other token in any."""
    size = case.block_size
    used = sum(count for _, count in planned.parts)
    assert used <= planned.plan.items == flashinfer_decode.count_items(case.bucket, case.kv_heads, case.sms)
    for first, end, _, query in planned.pieces[used:]:
        assert (first, end, query) == (0, 0, 0)
    assert all(count == 0 for _, count in planned.parts[len(case.contexts) :])
    seen: set[int] = set()
    for row, (seat, context) in enumerate(zip(planned.seats, case.contexts, strict=True)):
        begin, count = planned.parts[row]
        assert count >= 1
        at = seat * planned.width
        for i, (first, end, last, query) in enumerate(planned.pieces[begin : begin + count]):
            assert first == at < end
            assert query == case.first_row + row
            assert (first - seat * planned.width) * size % max(case.tile, size) == 0, "cut between two tiles only"
            assert last == (size if i < count - 1 else (context - 1) % size + 1)
            at = end
        assert at - seat * planned.width == -(-context // size)
        assert sum(planned.tokens(size)[begin : begin + count]) == context
        seen |= set(range(begin, begin + count))
    assert seen == set(range(used))


def check_order(case: Case, planned: Planned) -> None:
    """Pieces of a row differ by a tile at most, and rows follow each other with the longest pieces first."""
    tiles = [-(-tokens // max(case.tile, case.block_size)) for tokens in planned.tokens(case.block_size)]
    rows = sorted(part for part in planned.parts if part[1])
    largest = []
    for begin, count in rows:
        of_row = tiles[begin : begin + count]
        assert max(of_row) - min(of_row) <= 1
        largest.append(max(of_row))
    assert largest == sorted(largest, reverse=True)


def check(case: Case, device: torch.device) -> Planned:
    planned = make_plan(case, device)
    check_cover(case, planned)
    check_order(case, planned)
    return planned


@pytest.mark.parametrize("contexts", [(1,), (128,), (129, 128), (5000,), (5000, 1, 300), (700,) * 9])
def test_every_token_is_in_one_piece(contexts: tuple[int, ...], device: torch.device) -> None:
    check(Case(contexts), device)


@pytest.mark.parametrize("block_size", [1, 8, 24, 128, 256])
@pytest.mark.parametrize("tile", [128, 256])
def test_block_sizes(block_size: int, tile: int, device: torch.device) -> None:
    tile = tile // block_size * block_size or block_size
    check(Case((2000, 257, 90), block_size=block_size, tile=tile), device)


@pytest.mark.parametrize("sms", [1, 4, 33, 132])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_shares_and_heads(sms: int, kv_heads: int, device: torch.device) -> None:
    random = torch.Generator().manual_seed(sms)
    contexts = tuple(torch.randint(1, 3000, (21,), generator=random).tolist())
    check(Case(contexts, kv_heads=kv_heads, sms=sms), device)


def test_padding_and_a_first_row(device: torch.device) -> None:
    check(Case((900, 20, 6400), padding=5, first_row=7), device)


def test_no_live_row_is_no_piece(device: torch.device) -> None:
    planned = make_plan(Case((), padding=4), device)
    assert all(piece[:2] == (0, 0) for piece in planned.pieces)
    assert all(count == 0 for _, count in planned.parts)


def test_one_long_row_fills_the_share(device: torch.device) -> None:
    planned = check(Case((50_000,), sms=64), device)  # 128 programs at once, 16 for each head
    assert 14 <= planned.parts[0][1] <= 16


def test_rows_that_fill_the_share_are_not_cut(device: torch.device) -> None:
    planned = check(Case((4096,) * 16, sms=64), device)
    assert {count for _, count in planned.parts} == {1}


def test_long_rows_among_short_ones_are_cut_finely(device: torch.device) -> None:
    planned = check(Case((300,) * 40 + (9000,) * 2, sms=64), device)
    tiles = sum(-(-tokens // 128) for tokens in planned.tokens(16) if tokens > 0)
    longest = max(-(-tokens // 128) for tokens in planned.tokens(16))
    assert longest <= 1.5 * tiles / 16, "hardly longer than what each of the 16 programs at once has to do in all"


def test_a_plan_leaves_nothing_of_the_one_before(device: torch.device) -> None:
    plan = flashinfer_decode.DecodePlan(4, 8, 128, 16, 64, (5, 400), device)
    rows = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)

    def arrays(lengths: list[int], live: int) -> list[Tensor]:
        now = torch.tensor(lengths, dtype=torch.int32, device=device)
        plan.make(rows, now, zero + live, zero, 64)
        used = 2 * int(plan.parts[:, 1].sum())
        return [x.clone() for x in (plan.pages, plan.queries, plan.last_page[:used:2], plan.parts)]

    first = arrays([10, 20, 30, 40], 2)
    arrays([6000, 5000, 4000, 3000], 4)
    for before, after in zip(first, arrays([10, 20, 30, 40], 2), strict=True):
        assert torch.equal(before, after)


def library_kernel(
    floats: Tensor, ints: Tensor, numbers: list[int], q: Tensor, k: Tensor, v: Tensor, queries: Tensor,
    pages: Tensor, tables: Tensor, last_page: Tensor, out: Tensor, exponents: Tensor, *rest: object,
) -> None:  # fmt: skip
    """What the library's kernel does, in float32: one request of one query row after another, all heads at once.

    `q` is known by its first two rows, as on the device.
    """
    items, _, no_rows, tile_rows, request_at, query_tile_at, key_tile_at, _, place_at, longest_at = numbers[:10]
    out_at, exponents_at, valid_at, graph, split = numbers[10:]
    assert rest[:3] == (0, 1, -1)
    assert tile_rows == 16
    assert exponents.shape[0] == q.shape[0]
    assert split == graph

    def word(at: int, i: int) -> int:
        return int(ints.view(torch.uint8)[at + 4 * i : at + 4 * i + 4].view(torch.int32))

    if split:
        assert word(no_rows, 0) == 0, "the library merges nothing"
        size = out.numel() * out.element_size()
        out = floats[out_at : out_at + size].view(out.dtype).view(out.shape)
        heads = out.shape[1]
        exponents = floats[exponents_at : exponents_at + 4 * out.shape[0] * heads].view(torch.float32).view(-1, heads)
    else:
        exponents = exponents.as_strided((out.shape[0], out.shape[1]), (exponents.shape[1], 1))
    assert pages[-1] == tables.numel()
    q = q.as_strided((int(queries.max()) + 1, *q.shape[1:]), q.stride())
    for i in range(items):
        if split and not ints.view(torch.uint8)[valid_at + i]:
            continue
        assert word(query_tile_at, i) == word(key_tile_at, i) == 0
        request = word(request_at, i)
        first, end, query = int(pages[request]), int(pages[request + 1]), int(queries[request])
        assert queries[request + 1] - query == (end > first)
        if first == end:
            continue
        count = (end - first - 1) * k.shape[2] + int(last_page[request])
        assert count <= word(longest_at, 0)
        entries = tables.flatten()[first:end].long()
        keys, values = (x[entries].transpose(1, 2).flatten(0, 1)[:count].float() for x in (k, v))
        group = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        score = torch.einsum("hd,thd->ht", q[query].float(), keys) / math.sqrt(q.shape[2])
        total = torch.logsumexp(score, 1)
        place = word(place_at, request)
        exponents[place] = total / math.log(2)
        out[place] = torch.einsum("ht,thd->hd", torch.exp(score - total[:, None]), values).to(out.dtype)


@pytest.mark.parametrize("contexts,heads,kv_heads,sms,masked", [
    ((1,), 4, 2, 44, False),
    ((9000, 130), 4, 2, 44, False),
    ((40, 3), 4, 2, 3, True),
    ((3000, 130, 1, 700), 3, 1, 3, True),
    ((300,) * 15 + (2500,), 36, 18, 27, True),
])  # fmt: skip
def test_a_step_of_a_lane_is_the_attention(
    contexts: tuple[int, ...], heads: int, kv_heads: int, sms: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the library's kernel is emulated on the CPU; tests/gpu has the real one")
    monkeypatch.setattr(flashinfer_decode, "_kernel", lambda head_dim, dtype: library_kernel)
    device, dim, first_row, padding = torch.device("cpu"), 128, 3, 2
    bucket = len(contexts) + padding
    blocks = [-(-context // 16) for context in contexts]
    tables = torch.full((bucket + 3, max(blocks) + 2), 2**30, dtype=torch.int32)
    lengths = torch.full((bucket + 3,), 10**6, dtype=torch.int32)
    kv = torch.full((sum(blocks) + 1, 2, kv_heads, 16, dim), NAN, dtype=torch.float16)
    free = torch.randperm(sum(blocks) + 1).tolist()
    seats = torch.randperm(bucket + 2)[: len(contexts)].tolist()
    for seat, context, count in zip(seats, contexts, blocks, strict=True):
        own = torch.tensor([free.pop() for _ in range(count)])
        tables[seat, :count] = own
        lengths[seat] = context - 1
        values = torch.randn(count * 16, 2, kv_heads, dim, dtype=torch.float16)
        values[context:] = NAN
        kv[own] = values.unflatten(0, (count, 16)).permute(0, 2, 3, 1, 4)
    rows = torch.tensor(seats + [bucket + 2] * padding, dtype=torch.int32)
    live, first = torch.tensor([len(contexts)], dtype=torch.int32), torch.tensor([first_row], dtype=torch.int32)
    q = torch.randn(first_row + bucket, heads + 2 * kv_heads, dim, dtype=torch.float16)[:, :heads]
    out = torch.full((len(q), heads * dim), NAN, dtype=torch.float16)
    lane = flashinfer_decode.FlashInferDecode(
        bucket + 1, heads, kv_heads, dim, 16, sms + 1, device, torch.float16, tuple(tables.shape)
    )
    lane._results.view(torch.float16).fill_(NAN)
    lane.schedule(rows, lengths, live, first, sms)
    assert lane._plan.masked == masked
    lane.run(q, kv, tables, out)
    expected = torch.cat(
        [
            reference.attention(q[3 + row : 4 + row], kv, tables[seat], context - 1, None)
            for row, (seat, context) in enumerate(zip(seats, contexts, strict=True))
        ]
    )
    ours = out[first_row : first_row + len(contexts)].float()
    torch.testing.assert_close(ours, expected.float().view(len(contexts), -1), rtol=5e-3, atol=2e-3)
    assert out[:first_row].isnan().all()
    assert out[first_row + len(contexts) :].isnan().all()
