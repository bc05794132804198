"""Rules of tokens against plain arithmetic, and rows that never notice each other."""

from math import inf, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.token_rules import NO_TOKEN, TokenRules
from bulletserve.kernels.token_rules import RuledRow, RuledRows, RulesOfSeat, TokenHistory, logprobs
from tests.kernels.plain_rules import by_rules

VOCABULARY, SEATS = 23, 6
CPU = torch.device("cpu")

ids = st.integers(0, VOCABULARY - 1)
penalty = st.sampled_from([0.0, 0.5, 2.0, -1.5])
rules_of_all_kinds = st.builds(
    TokenRules,
    allowed_ids=st.lists(ids, max_size=9, unique=True).map(tuple),
    bad_words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    min_tokens=st.integers(0, 4),
    end_ids=st.lists(ids, max_size=3, unique=True).map(tuple),
    bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.0, 3.5]), max_size=4).map(lambda d: tuple(d.items())),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=penalty,
    presence_penalty=penalty,
    logprobs=st.none() | st.integers(0, 5),
)
sequence = st.lists(st.integers(0, 4), max_size=12)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


@settings(deadline=None)
@given(st.lists(st.tuples(rules_of_all_kinds, sequence, sequence), min_size=1, max_size=4), st.integers(0, 99))
def test_rules_are_plain_arithmetic_through_a_whole_answer(rows, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    history = TokenHistory(SEATS, VOCABULARY, CPU)
    seats = torch.randperm(SEATS, generator=generator)[: len(rows)].tolist()
    everything = [prompt + answer for _, prompt, answer in rows]
    for (rules, prompt, _), tokens, seat in zip(rows, everything, seats, strict=True):
        history.take(seat, TokenRules(frequency_penalty=1.0, bad_words=((1, 2),)), [0, 1, 2, 3], 1)  # an earlier guest
        history.take(seat, rules, tokens, len(prompt))
    of_seats = [RulesOfSeat.of(rules, len(prompt)) for rules, prompt, _ in rows]
    for _ in range(4):
        logits = torch.randn(len(rows), VOCABULARY, generator=generator) * 3
        expected = [
            by_rules(row, rules, tokens, len(prompt))
            for row, (rules, prompt, _), tokens in zip(logits.tolist(), rows, everything, strict=True)
        ]
        impossible = [max(row) == -inf for row in expected]
        for row, none in zip(expected, impossible, strict=True):
            if none:
                row[0] = 0.0  # something must be drawn
        ruled = RuledRows(
            [
                RuledRow(n, seat, len(tokens), of)
                for n, (seat, tokens, of) in enumerate(zip(seats, everything, of_seats, strict=True))
            ],
            VOCABULARY,
            CPU,
        )
        changed = logits.clone()
        chosen = ruled.draw(changed, history, torch.zeros(len(rows)), greedy)
        assert torch.allclose(changed, torch.tensor(expected), atol=1e-4)
        assert (chosen.logprobs is None) == all(rules.logprobs is None for rules, _, _ in rows)
        shown = zip(chosen.told.tolist(), chosen.tokens.tolist(), impossible, strict=True)
        assert all(told == (NO_TOKEN if none else token) for told, token, none in shown)
        for row, token in zip(everything, chosen.tokens.tolist(), strict=True):
            row.append(token)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_min_p_keeps_what_is_likely_enough_at_the_temperature(temperature: float, min_p: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 2.9, -4.0]])
    rules = [TokenRules(min_p=min_p, logprobs=1), TokenRules(logprobs=1)]
    rows = RuledRows([RuledRow(n, n, 5, RulesOfSeat.of(one, 5)) for n, one in enumerate(rules)], 4, CPU)
    seen: list[torch.Tensor] = []

    def draw(kept: torch.Tensor) -> torch.Tensor:
        seen.append(kept.clone())
        return torch.tensor([0, 3])

    _, _, told = rows.draw(logits.clone(), TokenHistory(2, 4, CPU), torch.full((2,), temperature), draw)
    for row, kept in enumerate(seen[0].tolist()):
        likely = (logits[row] / temperature).softmax(-1)
        least = (min_p if row == 0 else 0.0) * float(likely.max())
        assert [value > -inf for value in kept] == (likely >= least - 1e-7).tolist()
    assert told is not None  # told are the logarithms before min_p
    assert torch.allclose(told.floats[:, 0], logits.log_softmax(-1)[[0, 1], [0, 3]])


def test_min_p_leaves_greedy_rows_alone() -> None:
    rules = TokenRules(min_p=0.9)
    rows = RuledRows([RuledRow(0, 0, 1, RulesOfSeat.of(rules, 1))], 3, CPU)
    logits = torch.tensor([[1.0, 2.0, 1.9]])
    tokens, _, _ = rows.draw(logits, TokenHistory(1, 3, CPU), torch.zeros(1), greedy)
    assert tokens.tolist() == [1] and logits.isfinite().all()


def test_logprobs_and_ranks() -> None:
    logits = torch.tensor([[0.0, log(2.0), log(5.0)], [1.0, 1.0, -inf]])
    told = logprobs(logits, torch.tensor([1, 2]), 20)
    assert told.ints.tolist()[0] == [2, 2, 1, 0] and told.ints.tolist()[1][0] == 3
    assert told.floats[0].exp().tolist() == pytest.approx([0.25, 0.625, 0.25, 0.125])
    assert told.floats[1, 0] == -inf


def test_a_seat_whose_rules_no_longer_matter_is_not_drawn_again() -> None:
    of = RulesOfSeat.of(TokenRules(min_tokens=3, end_ids=(1,)), prompt_tokens=10)
    assert [of.matters_at(position) for position in (10, 12, 13)] == [True, True, False]
    assert not RulesOfSeat.of(TokenRules(prompt_logprobs=3), 10).matters_at(10)
