"""Sampling on the GPU: the CPU path's tokens, exact sets, right frequencies, rows that never notice each other."""

import pytest
import torch
from torch import Tensor

from bulletserve.core.errors import ConfigError
from bulletserve.kernels import sampling as cpu
from bulletserve.kernels.cuda.sampling import SamplingScratch, sample
from bulletserve.kernels.cuda.step_tables import SeatTables
from bulletserve.kernels.reference import sampling_distribution
from tests.kernels.test_sampling import assert_distributed, concat, rows_of

VOCABULARY = 977  # odd, less than one chunk
WIDE = 2 * 1024 + 331


def draw(logits: Tensor, rows: cpu.SamplingRows, device: torch.device, sms: int = 4, padding: int = 0) -> Tensor:
    """The kernel's tokens [R] int64, its rows sitting at shuffled seats, `padding` dead rows behind them."""
    count, vocabulary = logits.shape
    seats = torch.randperm(count + 3)[: count + padding]
    tables = SeatTables(
        tables=torch.empty(0),
        lengths=torch.empty(0),
        last_token=torch.empty(0),
        temperature=torch.full((count + 3,), float("nan")).index_copy_(0, seats[:count], rows.temperature),
        top_p=torch.full((count + 3,), float("nan")).index_copy_(0, seats[:count], rows.top_p),
        top_k=torch.full((count + 3,), -5, dtype=torch.int32).index_copy_(0, seats[:count], rows.top_k.int()),
        seed=torch.zeros(count + 3, dtype=torch.int64).index_copy_(0, seats[:count], rows.seed),
    )
    on_device = SeatTables(*(getattr(tables, name).to(device) for name in SeatTables.__dataclass_fields__))
    all_logits = torch.cat((logits, torch.full((padding, vocabulary), float("nan")))).to(device)
    positions = torch.cat((rows.position, torch.zeros(padding, dtype=torch.int64))).int().to(device)
    out = torch.full((count + padding,), -7, dtype=torch.int32, device=device)
    live = torch.tensor([count], dtype=torch.int32, device=device)
    scratch = SamplingScratch.allocate(count + padding, vocabulary, device)
    for buffer in (scratch.peak_values, scratch.level_masses, scratch.candidates):
        buffer.fill_(float("nan"))
    for buffer in (scratch.peak_ids, scratch.masses, scratch.level_counts, scratch.sizes, scratch.candidate_ids):
        buffer.fill_(-(2**31))
    sample(all_logits, seats.int().to(device), live, on_device, positions, out, scratch, sms)
    assert bool((out[count:] == -7).all()), "a padding row was written"
    return out[:count].cpu().long()


def mixed_rows(count: int) -> cpu.SamplingRows:
    kinds = [
        {"temperature": 0.0, "top_k": 3},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 9},
        {"temperature": 0.9, "top_k": 30, "top_p": 0.5},
        {"temperature": 4.0, "top_p": 0.97},
        {"temperature": 0.1, "top_k": 400, "top_p": 0.999},
    ]
    parts = [rows_of(1, **kinds[i % len(kinds)], seed=(-77) ** (i % 10), first=5 * i) for i in range(count)]  # type: ignore[arg-type]
    return concat(parts)


def test_greedy_takes_the_first_of_equals(device: torch.device) -> None:
    logits = torch.randn(9, WIDE)
    logits[4, [17, 300, 2000]] = 50.0
    logits[5] = float("-inf")
    logits[5, 2100] = -3.0
    assert torch.equal(draw(logits, rows_of(9, temperature=0.0), device), logits.argmax(dim=-1))


@pytest.mark.parametrize("vocabulary", [1, 7, VOCABULARY, 1024, WIDE])
def test_same_tokens_as_the_cpu_path(device: torch.device, vocabulary: int) -> None:
    logits = torch.randn(14, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3
    logits[:, ::5] = float("-inf")
    logits[:, vocabulary // 2] = 1.5
    rows = mixed_rows(14)
    assert torch.equal(draw(logits, rows, device, padding=2), cpu.sample(logits, rows))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.6, 0, 1.0), (1.5, 0, 0.8), (1.0, 12, 1.0), (0.8, 40, 0.9), (1.0, 0, 1e-9)]
)
def test_frequencies(device: torch.device, temperature: float, top_k: int, top_p: float) -> None:
    draws, vocabulary = (20_000 if device.type == "cuda" else 20), 61  # interpreted, a row takes 0.1 s
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(11)) * 2
    rows = rows_of(draws, temperature, top_p, top_k)
    tokens = draw(logits.expand(draws, -1), rows, device)
    assert float((tokens == cpu.sample(logits.expand(draws, -1), rows)).float().mean()) > 0.9999
    probabilities = sampling_distribution(logits, temperature, top_k, top_p)
    if int((probabilities > 0).sum()) == 1:
        assert torch.equal(tokens.unique(), probabilities.nonzero().squeeze(1))
    elif device.type == "cuda":
        assert_distributed(tokens, probabilities)


def drawn_set(logits: list[float], device: torch.device, **options: float) -> set[int]:
    count = 4000 if device.type == "cuda" else 24
    rows = rows_of(count, **options)  # type: ignore[arg-type]
    return set(draw(torch.tensor(logits).expand(count, -1), rows, device).tolist())


def test_top_k_keeps_ties_with_the_last(device: torch.device) -> None:
    assert drawn_set([1.0, 3.0, 2.0, 2.0, 0.0, 2.0], device, top_k=2) == {1, 2, 3, 5}
    assert drawn_set([1.0, 3.0, 2.0, 2.0, 0.0, 2.0], device, top_k=1) == {1}
    assert drawn_set([1.0, 3.0, 2.0], device, top_k=50) == {0, 1, 2}


def test_top_p_takes_lower_ids_among_equals(device: torch.device) -> None:
    even = [5.0] * 8
    assert drawn_set(even, device, top_p=0.5) == {0, 1, 2, 3}
    assert drawn_set(even, device, top_p=0.500001) == {0, 1, 2, 3, 4}
    assert drawn_set([0.0, *even[:3], 0.0, 5.0], device, top_p=0.25) == {1, 2}
    logits = torch.tensor([0.125, 0.5, 0.125, 0.25]).log().tolist()
    assert drawn_set(logits, device, top_p=0.51) == {1, 3}
    assert drawn_set(logits, device, top_p=0.8) == {0, 1, 3}
    assert drawn_set(logits, device, top_p=0.9) == {0, 1, 2, 3}


def test_top_p_applies_to_what_top_k_left(device: torch.device) -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert drawn_set(logits, device, top_k=2, top_p=0.55) == {0}
    assert drawn_set(logits, device, top_k=2, top_p=0.6) == {0, 1}


def test_sets_wider_than_the_candidates(device: torch.device) -> None:
    """Nearly flat rows over a vocabulary beyond the buffer are searched in full."""
    vocabulary = 20_011
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, vocabulary, generator=generator) * torch.tensor([0.01, 0.3, 1.0, 0.0, 1.0, 4.0])[:, None]
    rows = concat(
        [
            rows_of(3, top_p=0.9),
            rows_of(1, top_p=0.9, seed=3),
            rows_of(1, top_k=19_000, top_p=0.95),
            rows_of(1, top_p=0.9),
        ]
    )
    assert torch.equal(draw(logits, rows, device), cpu.sample(logits, rows))


def test_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    count = 14 if device.type == "cuda" else 7  # of each kind one
    rows = mixed_rows(count)
    logits = torch.randn(count, WIDE, generator=torch.Generator().manual_seed(3)) * 3
    together = draw(logits, rows, device)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(4))
    assert torch.equal(draw(logits[order], rows.select(order), device, sms=1, padding=1), together[order])
    for i in range(count):
        assert draw(logits[i : i + 1], rows.select(torch.tensor([i])), device, padding=i % 3) == together[i]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, under Triton's interpreter
def test_extremes(device: torch.device) -> None:
    logits = torch.full((3, VOCABULARY), float("-inf"))
    logits[:, 44] = 1e30
    logits[:, 45] = -1e30
    for temperature in (1e-38, 1e-30, 1.0, 1e30):
        for options in ({}, {"top_p": 0.99}, {"top_k": 5}):
            assert draw(logits, rows_of(3, temperature, **options), device).tolist() == [44, 44, 44]  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_broken_logits_give_a_valid_token(device: torch.device) -> None:
    some = torch.randn(VOCABULARY)
    some[::2] = float("nan")
    infinite = torch.randn(VOCABULARY)
    infinite[[3, 500]] = float("inf")
    logits = torch.stack((torch.full_like(some, float("nan")), torch.full_like(some, float("-inf")), some, infinite))
    for options in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 4}, {"top_k": 4, "top_p": 0.9}):
        tokens = draw(logits, rows_of(4, **options), device)  # type: ignore[arg-type]
        assert bool(((tokens >= 0) & (tokens < VOCABULARY)).all())
        assert tokens[2] % 2 == 1 and tokens[3] in (3, 500)


def test_vocabulary_has_a_limit() -> None:
    with pytest.raises(ConfigError, match="vocabularies"):
        SamplingScratch.allocate(1, (1 << 20) + 1, torch.device("cpu"))
