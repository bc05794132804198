"""A load to measure kernels beside: it reads only what it may, and it ends when it is told to."""

import time

import pytest
import torch

from bulletserve.kernels.cuda import neighbour
from bulletserve.kernels.cuda.neighbour import Kind, Neighbour

GPU = torch.cuda.is_available()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Tiles that an interpreter can multiply; how many elements two of each factor take."""
    monkeypatch.setattr(neighbour, "_TILE", (16, 32, 16))
    monkeypatch.setattr(neighbour, "_DEPTH", 32)
    return 32 * (neighbour._ROW_TILES * 16 + 2 * 32)


@pytest.mark.skipif(GPU, reason="runs until it is told to end")
@pytest.mark.parametrize("kind", ["reads", "multiplies"])
def test_every_program_works_on_its_own_part(kind: Kind, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "_MOST_TURNS", 3)
    monkeypatch.setattr(neighbour, "_READ_WORDS", 64)
    memory = torch.full((small,), 2.0, dtype=torch.float16)
    load = Neighbour(kind, None, 4, memory)  # type: ignore[arg-type]
    load._sums.fill_(-1.0)
    load._enough.zero_()
    load.launch()
    if kind == "reads":
        words = load._sums.view(torch.int32)[: min(32, small // 2 // 64)]
        assert words.tolist() == [0] * len(words), "an even number of reads of one word cancel out"
    else:
        assert load._sums[:4].tolist() == [3 * 32 * 4.0] * 4


def test_memory_must_hold_a_tile_of_each_factor(small: int) -> None:
    with pytest.raises(ValueError, match="too few"):
        Neighbour("reads", None, 4, torch.zeros(small // 4, dtype=torch.bfloat16))  # type: ignore[arg-type]


@pytest.mark.skipif(not GPU, reason="runs beside something")
@pytest.mark.parametrize("kind", ["reads", "multiplies"])
def test_it_runs_beside_and_ends_also_when_something_failed(kind: Kind) -> None:
    memory = torch.randn(neighbour.LOAD_ELEMENTS, device="cuda").bfloat16()
    stream, own = torch.cuda.Stream(), torch.cuda.Stream()
    load = Neighbour(kind, stream, 60, memory)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    for _ in range(2):
        began_s = time.monotonic()
        with pytest.raises(KeyError), torch.cuda.stream(own), load.running():
            torch.cuda._sleep(10_000_000)
            own.synchronize()
            assert not stream.query()
            raise KeyError
        assert stream.query()
    assert time.monotonic() - began_s < 1.0
