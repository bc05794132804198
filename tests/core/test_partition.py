"""Partitions and lattices: what is granted, and the nearest to what was asked."""

import pytest

from bulletserve.core.partition import Lattice, Partition

LATTICE = Lattice.of_splits(132, (Partition(100, 32), Partition(32, 100), Partition(66, 66)))


def test_a_lattice_always_holds_all_to_one_lane() -> None:
    assert Partition(132, 0) in LATTICE.partitions
    assert Partition(0, 132) in LATTICE.partitions
    assert Lattice.of_splits(8, ()).splits == ()


def test_splits_are_sorted_and_shares_are_those_of_the_partitions() -> None:
    assert LATTICE.splits == (Partition(32, 100), Partition(66, 66), Partition(100, 32))
    assert LATTICE.prefill_shares == {32, 66, 100, 132}
    assert LATTICE.decode_shares == {32, 66, 100, 132}


@pytest.mark.parametrize(("fraction", "decode_sms"), [(0.01, 32), (0.3, 32), (0.5, 66), (0.7, 100), (0.99, 100)])
def test_the_nearest_split(fraction: float, decode_sms: int) -> None:
    assert LATTICE.nearest_split(fraction).decode_sms == decode_sms


def test_a_device_that_cannot_be_split_gives_each_lane_everything() -> None:
    assert Lattice.of_splits(1, ()).nearest_split(0.5) == Partition(1, 1)
