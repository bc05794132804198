"""Sampling: exact sets, right frequencies, and rows that never notice each other."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from bulletserve.kernels.reference import sampling_distribution
from bulletserve.kernels.sampling import SamplingRows, sample, uniforms

VOCABULARY = 977
# Chi-square's 99.99 % point by degrees of freedom (Wilson-Hilferty), for fixed seeds: no luck involved.
SIGMAS = 3.72


def rows_of(
    count: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 7, first: int = 0
) -> SamplingRows:
    """`count` draws of one stream, at the positions from `first` on."""
    return SamplingRows(
        torch.full((count,), temperature),
        torch.full((count,), top_p),
        torch.full((count,), top_k, dtype=torch.int64),
        torch.full((count,), seed, dtype=torch.int64),
        torch.arange(first, first + count),
    )


def concat(parts: list[SamplingRows]) -> SamplingRows:
    return SamplingRows(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(SamplingRows)))


def assert_distributed(tokens: Tensor, probabilities: Tensor) -> None:
    """Chi-square over the outcomes expected at least five times, the rest as one."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0, "a token outside the set was drawn"
    expected = probabilities.double() * len(tokens)
    often = expected >= 5
    statistic = float(((counts - expected)[often] ** 2 / expected[often]).sum())
    freedom = int(often.sum()) - 1
    rest = float(expected[~often].sum())
    if rest >= 5:
        statistic += (float(counts[~often].sum()) - rest) ** 2 / rest
        freedom += 1
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + SIGMAS * spread**0.5) ** 3


def test_temperature_zero_is_argmax_the_first_of_equals() -> None:
    logits = torch.randn(9, VOCABULARY)
    logits[4, [17, 300, 700]] = 50.0
    chosen = sample(logits, rows_of(9, temperature=0.0, top_p=0.3, top_k=5))
    assert torch.equal(chosen, logits.argmax(dim=-1))
    assert chosen[4] == 17
    assert chosen.dtype == torch.int64


def test_uniforms_are_uniform_and_independent_across_seeds_and_positions() -> None:
    for seeds, positions in (
        (torch.zeros(100_000, dtype=torch.int64), torch.arange(100_000)),
        (torch.arange(-50_000, 50_000), torch.full((100_000,), 3)),
        (torch.randint(-(2**63), 2**63 - 1, (100_000,)), torch.arange(100_000)),
    ):
        u = uniforms(seeds, positions)
        assert u.dtype == torch.float64 and float(u.min()) >= 0 and float(u.max()) < 1
        assert_distributed((u * 200).long(), torch.full((200,), 1 / 200))
        pairs = (u[:-1] * 14).long() * 14 + (u[1:] * 14).long()
        assert_distributed(pairs, torch.full((196,), 1 / 196))


def test_seed_and_position_do_not_stand_in_for_each_other() -> None:
    grid = torch.cartesian_prod(torch.arange(-40, 40), torch.arange(80))
    assert len(uniforms(grid[:, 0], grid[:, 1]).unique()) == len(grid)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.5, 0, 0.8), (1.0, 12, 1.0), (0.8, 40, 0.9), (2.0, 1, 1.0), (1.0, 0, 1e-9)],
)
def test_frequencies(temperature: float, top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(VOCABULARY, generator=generator) * 2
    rows = rows_of(40_000, temperature, top_p, top_k)
    tokens = torch.cat(
        [sample(logits.expand(2000, -1), rows.select(part)) for part in torch.arange(40_000).split(2000)]
    )
    probabilities = sampling_distribution(logits, temperature, top_k, top_p)
    if int((probabilities > 0).sum()) == 1:
        assert torch.equal(tokens.unique(), probabilities.nonzero().squeeze(1))
    else:
        assert_distributed(tokens, probabilities)


def drawn_set(logits: list[float], **options: float) -> set[int]:
    rows = rows_of(4000, **options)  # type: ignore[arg-type]
    return set(sample(torch.tensor(logits).expand(4000, -1), rows).tolist())


def test_top_k_keeps_ties_with_the_last() -> None:
    assert drawn_set([1.0, 3.0, 2.0, 2.0, 0.0, 2.0], top_k=2) == {1, 2, 3, 5}
    assert drawn_set([1.0, 3.0, 2.0, 2.0, 0.0, 2.0], top_k=1) == {1}
    assert drawn_set([1.0, 3.0, 2.0], top_k=50) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.tensor([0.125, 0.5, 0.125, 0.25]).log().tolist()
    assert drawn_set(logits, top_p=0.5) == {1}
    assert drawn_set(logits, top_p=0.51) == {1, 3}
    assert drawn_set(logits, top_p=0.74) == {1, 3}
    # Ties at the border: only as many as are needed, lower ids first.
    assert drawn_set(logits, top_p=0.8) == {0, 1, 3}
    assert drawn_set(logits, top_p=0.9) == {0, 1, 2, 3}


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    # Of the two kept, the first has 0.4 / 0.7 = 0.57 of the mass.
    assert drawn_set(logits, top_k=2, top_p=0.55) == {0}
    assert drawn_set(logits, top_k=2, top_p=0.6) == {0, 1}


def test_top_p_sets_wider_than_the_first_look() -> None:
    """Nearly flat rows need a full sort; peaked rows beside them must not notice."""
    generator = torch.Generator().manual_seed(5)
    flat = torch.randn(VOCABULARY, generator=generator) * 0.01
    peaked = torch.randn(VOCABULARY, generator=generator) * 6
    rows = rows_of(6000, top_p=0.9)
    mixed = torch.stack((flat, peaked)).repeat(3000, 1)
    tokens = sample(mixed, rows)
    assert len(tokens[::2].unique()) > 600
    assert float(sampling_distribution(flat, 1.0, 0, 0.9)[tokens[::2]].min()) > 0
    alone = torch.cat([sample(mixed[i : i + 1], rows.select(torch.tensor([i]))) for i in range(1, 200, 2)])
    assert torch.equal(tokens[1:200:2], alone)


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    kinds = [
        rows_of(8, temperature=0.0),
        rows_of(8, temperature=0.7, seed=-5),
        rows_of(8, temperature=1.3, top_p=0.9, seed=2**62),
        rows_of(8, temperature=1.0, top_k=9, first=100),
        rows_of(8, temperature=0.9, top_k=30, top_p=0.5),
    ]
    rows = concat(kinds)
    logits = torch.randn(40, VOCABULARY, generator=generator) * 3
    together = sample(logits, rows)
    order = torch.randperm(40, generator=generator)
    assert torch.equal(sample(logits[order], rows.select(order)), together[order])
    for i in range(40):
        assert sample(logits[i : i + 1], rows.select(torch.tensor([i]))) == together[i]


def test_seeds_and_positions_change_the_draw() -> None:
    logits = torch.zeros(64, VOCABULARY)
    tokens = [sample(logits, rows_of(64, seed=seed)) for seed in (1, 2)]
    assert len(tokens[0].unique()) > 50
    assert (tokens[0] == tokens[1]).sum() < 5
    assert torch.equal(tokens[0], sample(logits, rows_of(64, seed=1)))


def test_extreme_logits_and_temperatures() -> None:
    logits = torch.full((3, VOCABULARY), float("-inf"))
    logits[:, 44] = 1e30
    logits[:, 45] = -1e30
    for temperature in (1e-30, 1.0, 1e30):
        assert sample(logits, rows_of(3, temperature, top_p=0.99)).tolist() == [44, 44, 44]
    huge = torch.tensor([[1e4, 1e4 - 1e-2, 0.0]]).expand(500, -1)
    assert set(sample(huge, rows_of(500, 1e-30)).tolist()) == {0}


def test_arguments_are_left_alone() -> None:
    logits = torch.randn(6, VOCABULARY)
    before = logits.clone()
    sample(logits, rows_of(6, temperature=0.7, top_p=0.8, top_k=5))
    assert torch.equal(logits, before)
