"""Products are measured once for each shape, share and number of rows, on a share beside what its neighbour will do."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import Lane
from bulletserve.engine.cuda import products
from bulletserve.kernels.cuda.matmul import Weight
from bulletserve.kernels.cuda.matmul_choice import Cell, Choice, ChoiceTable, TableKey
from bulletserve.kernels.cuda.neighbour import Neighbour

LATTICE = Lattice.of_splits(132, (Partition(100, 32), Partition(68, 64)))
LAYER, HEAD = (16, 8), (24, 8)


class Manager:
    lattice = LATTICE
    device = torch.device("cpu")

    def stream(self, lane: Lane, sms: int) -> tuple[Lane, int]:
        return lane, sms


class Tuner:
    """Takes what it is asked to measure for measured, until `stops_after` calls."""

    def __init__(self, stops_after: int = 1000) -> None:
        self.calls: list[tuple] = []
        self.stops_after = stops_after

    def __call__(self, weights, buckets, shares, dtype, scratch, budget_s, eager_from, float_out):
        table = ChoiceTable(TableKey.of("card", 132, str(dtype)))
        ((n, k),) = weights
        self.calls.append(((n, k), tuple(buckets), shares, budget_s))
        if len(self.calls) <= self.stops_after:
            for m in buckets:
                for sms in shares:
                    table.put(n, k, m, sms, Cell(Choice("cublas"), Choice("cublas")))
        return table


@pytest.fixture
def choose(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    monkeypatch.setattr(products, "default_path", lambda key: tmp_path / "table.json")
    monkeypatch.setattr(products, "warm", lambda *_: None)
    monkeypatch.setattr(products, "LOAD_ELEMENTS", 4096 * (1024 + 256))
    layer = [Weight(torch.zeros(LAYER)) for _ in range(3)]
    projections = {LAYER: layer, HEAD: [Weight(torch.zeros(HEAD))]}
    model = SimpleNamespace(projections=projections, head_shape=HEAD, dtype=torch.bfloat16)

    def choose(tuner: Tuner) -> ChoiceTable:
        monkeypatch.setattr(products, "tune", tuner)
        return products.choose_products(model, Manager(), 8, 512, None)

    return choose


def test_what_was_measured_is_not_measured_again(choose) -> None:
    first, second = Tuner(), Tuner()
    choose(first)
    assert [(call[0], sorted(call[2])) for call in first.calls] == [
        (LAYER, [32, 64, 132]), (HEAD, [32, 64, 132]), (HEAD, [68, 100]), (LAYER, [68, 100, 132]),
    ]  # fmt: skip
    table = choose(second)
    assert second.calls == []
    assert set(table.cells[LAYER]) == {32, 64, 68, 100, 132}


def test_what_there_was_no_time_for_is_measured_at_the_next_start(choose) -> None:
    choose(Tuner(stops_after=2))
    again = Tuner()
    choose(again)
    assert [call[0] for call in again.calls] == [HEAD, LAYER]


def test_all_measurements_share_the_time(choose, monkeypatch) -> None:
    monkeypatch.setattr(products, "time", SimpleNamespace(monotonic=lambda: 0.0))
    tuner = Tuner()
    choose(tuner)
    assert pytest.approx(tuner.calls[0][3], rel=0.01) == products.TUNING_S / 4
    assert pytest.approx(tuner.calls[-1][3], rel=0.01) == products.TUNING_S


def test_a_share_has_a_neighbour_and_all_sms_have_none(choose) -> None:
    tuner = Tuner()
    choose(tuner)
    beside = {
        place.stream: place.neighbour and (place.neighbour.kind, place.neighbour._stream, place.neighbour._sms)
        for call in tuner.calls
        for place in call[2].values()
    }
    assert beside == {
        (Lane.DECODE, 32): ("multiplies", (Lane.PREFILL, 100), 100),
        (Lane.DECODE, 64): ("multiplies", (Lane.PREFILL, 68), 68),
        (Lane.DECODE, 132): None,
        (Lane.PREFILL, 100): ("reads", (Lane.DECODE, 32), 32),
        (Lane.PREFILL, 68): ("reads", (Lane.DECODE, 64), 64),
        (Lane.PREFILL, 132): None,
    }
    assert all(isinstance(place.neighbour, Neighbour | None) for call in tuner.calls for place in call[2].values())


def test_lanes_that_share_all_sms_are_measured_alone(choose, monkeypatch) -> None:
    monkeypatch.setattr(Manager, "lattice", Lattice.of_splits(132, (Partition(132, 132),)))
    tuner = Tuner()
    choose(tuner)
    assert {place.neighbour for call in tuner.calls for place in call[2].values()} == {None}
