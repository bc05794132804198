"""Penalties in one launch are those of plain torch."""

import pytest
import torch

pytest.importorskip("triton")

from bulletserve.core.token_rules import TokenRules
from bulletserve.kernels.cuda.penalties import penalise
from bulletserve.kernels.token_rules import RuledRow, RuledRows, RulesOfSeat, TokenHistory

RULES = (
    TokenRules(repetition_penalty=1.3),
    TokenRules(frequency_penalty=1.5, presence_penalty=-2.0),
    TokenRules(repetition_penalty=0.5, frequency_penalty=-0.3, presence_penalty=0.7),
)


@pytest.mark.parametrize("vocabulary", [5, 2048, 5003])
def test_penalties_are_those_of_plain_torch(device: torch.device, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)

    def ids(count: int) -> list[int]:
        return torch.randint(0, vocabulary, (count,), generator=generator).tolist()

    history = TokenHistory(6, vocabulary, device)
    rows = []
    for row, (seat, rules) in enumerate(zip((4, 0, 2), RULES, strict=True)):
        prompt, answer = ids(40), ids(30)
        history.take(seat, rules, [*prompt, *answer], len(prompt))
        rows.append(RuledRow(row, seat, 70, RulesOfSeat.of(rules, len(prompt))))
    assert all(row.of.only_penalises for row in rows)
    logits = torch.randn((3, vocabulary), generator=generator).to(device) * 5
    logits[1, ids(1)] = float("-inf")
    ruled = RuledRows(rows, vocabulary, device)
    expected = logits.clone()
    ruled.apply(expected, history)
    penalise(logits, ruled.seats.int(), history.token_counts, history.penalties)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert not RulesOfSeat.of(TokenRules(repetition_penalty=1.3, logprobs=0), 1).only_penalises
    assert not RulesOfSeat.of(TokenRules(logprobs=0), 1).only_penalises
