"""The device's bookkeeping, against Python."""

import struct

import pytest
import torch

from bulletserve.kernels.cuda.step_tables import (
    SeatTables,
    apply_updates,
    begin_decode,
    finish,
    gather_rows,
    update_words,
)

SEATS, MAX_BLOCKS = 9, 11


def make_seats(device: torch.device, seats: int = SEATS) -> SeatTables:
    return SeatTables(
        tables=torch.randint(0, 1 << 20, (seats, MAX_BLOCKS), dtype=torch.int32, device=device),
        lengths=torch.randint(0, MAX_BLOCKS * 4, (seats,), dtype=torch.int32, device=device),
        last_token=torch.randint(0, 1000, (seats,), dtype=torch.int32, device=device),
        temperature=torch.rand(seats, device=device),
        top_p=torch.rand(seats, device=device),
        top_k=torch.randint(0, 9, (seats,), dtype=torch.int32, device=device),
        seed=torch.randint(-(2**62), 2**62, (seats,), device=device),
    )


def clone(seats: SeatTables) -> SeatTables:
    return SeatTables(*(getattr(seats, name).clone() for name in SeatTables.__dataclass_fields__))


def assert_same(got: SeatTables, expected: SeatTables) -> None:
    for name in SeatTables.__dataclass_fields__:
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("pair_capacity", "pairs", "seat_capacity", "changed"),
    [(5, 0, 3, 0), (5, 5, 3, 3), (300, 299, 300, 280), (700, 1, 2, 0), (1, 0, 9, 9)],
)
def test_apply_updates(device: torch.device, pair_capacity: int, pairs: int, seat_capacity: int, changed: int) -> None:
    seats = make_seats(device, 301)
    expected = clone(seats)
    words = torch.randint(-9, 9, (update_words(pair_capacity, seat_capacity),), dtype=torch.int32)
    words[0], words[1] = pairs, changed
    places = torch.randperm(expected.tables.numel())[:pairs]
    for i, place in enumerate(places.tolist()):
        words[2 + 2 * i], words[3 + 2 * i] = place, 5000 + i
        expected.tables.view(-1)[place] = 5000 + i
    for i, seat in enumerate(torch.randperm(301)[:changed].tolist()):
        seed = -(2**63) + 12345 * i if i % 2 else 2**62 + 2**31 + i
        record = struct.pack("<iiffiq", seat, 40 + i, 0.1 * i, 1 / (1 + i), i, seed)
        at = 2 + 2 * pair_capacity + 7 * i
        words[at : at + 7] = torch.tensor(struct.unpack("<7i", record), dtype=torch.int32)
        expected.lengths[seat], expected.temperature[seat], expected.top_p[seat] = 40 + i, 0.1 * i, 1 / (1 + i)
        expected.top_k[seat], expected.seed[seat] = i, seed
    apply_updates(words.to(device), pair_capacity, seat_capacity, seats)
    assert_same(seats, expected)


@pytest.mark.parametrize(("bucket", "live", "first"), [(1, 1, 0), (6, 4, 3), (8, 0, 0), (300, 7, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_begin_decode(device: torch.device, bucket: int, live: int, first: int, block_size: int) -> None:
    seats = make_seats(device)
    seats.lengths.remainder_(MAX_BLOCKS * block_size)
    before = clone(seats)
    chosen = torch.randperm(SEATS - 1)[:live].tolist()
    rows = ints(chosen + [SEATS - 1] * (bucket - live), device)
    ids, positions = (torch.full((first + bucket + 2,), -77, dtype=torch.int32, device=device) for _ in range(2))
    slots = torch.full((first + bucket + 2,), -77, dtype=torch.int64, device=device)
    begin_decode(rows, ints([live], device), ints([first], device), seats, block_size, ids, positions, slots)
    assert_same(seats, before)
    for b in range(-first, bucket + 2):
        got = [int(x[first + b]) for x in (ids, positions, slots)]
        if not 0 <= b < bucket:
            assert got == [-77] * 3
        elif b >= live:
            assert got == [-1, 0, -1]
        else:
            row = chosen[b]
            position = int(seats.lengths[row])
            block = int(seats.tables[row, position // block_size])
            assert got == [int(seats.last_token[row]), position, block * block_size + position % block_size]


@pytest.mark.parametrize("given", [True, False])
def test_finish(device: torch.device, given: bool) -> None:
    seats = make_seats(device)
    expected = clone(seats)
    tokens, lengths = ints([71, 72, 73, 74], device), ints([5, 6, 7, 8], device)
    finish(ints([3, 0, 6, 8], device), ints([3], device), tokens, lengths if given else None, seats)
    for i, row in enumerate([3, 0, 6]):
        expected.last_token[row] = tokens[i]
        expected.lengths[row] = lengths[i] if given else expected.lengths[row] + 1
    assert_same(seats, expected)


def test_gather_rows(device: torch.device) -> None:
    hidden = torch.randn(7, 3080, device=device).to(torch.bfloat16)
    out = torch.full((4, 3080), -5.0, dtype=torch.bfloat16, device=device)
    gather_rows(hidden, ints([6, 2, 2, -999], device), ints([3], device), out)
    assert torch.equal(out[:3], hidden[[6, 2, 2]])
    assert bool((out[3] == -5).all())
