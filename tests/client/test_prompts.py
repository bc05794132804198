"""Prompts have their lengths, the seed decides them, and shared blocks are shared."""

import pytest

from bulletserve.client.prompts import prompts_of_lengths, prompts_of_texts
from bulletserve.workload.request_list import RequestLengths
from bulletserve.workload.traces import BLOCK_TOKENS

REQUESTS = [RequestLengths(0.5, 40, 3), RequestLengths(1.0, 1, 4), RequestLengths(2.0, 700, 5)]


def test_ids_have_the_lengths_wanted_and_lie_in_their_range() -> None:
    made = prompts_of_lengths(REQUESTS, as_text=False, ids=(50, 60), salt=(3,))
    assert [(one.number, one.due_s, len(one.prompt), one.output_tokens) for one in made] == [
        (0, 0.5, 40, 3), (1, 1.0, 1, 4), (2, 2.0, 700, 5),
    ]  # fmt: skip
    drawn = {token for one in made for token in one.prompt}
    assert drawn == set(range(50, 60)) and all(type(token) is int for token in drawn)


def test_the_salt_decides_and_prompts_differ() -> None:
    made = prompts_of_lengths(REQUESTS, as_text=False, salt=(1, 2))
    assert made == prompts_of_lengths(REQUESTS, as_text=False, salt=(1, 2))
    assert made[2].prompt != prompts_of_lengths(REQUESTS, as_text=False, salt=(1, 3))[2].prompt
    twins = prompts_of_lengths([RequestLengths(0, 300, 1)] * 2, as_text=False)
    assert twins[0].prompt[:16] != twins[1].prompt[:16], "no prefix cache may help"


@pytest.mark.parametrize("as_text", [False, True])
def test_blocks_of_one_name_are_equal_and_others_differ(as_text: bool) -> None:
    requests = [RequestLengths(0, 1000, 1), RequestLengths(0, 1500, 1), RequestLengths(0, 600, 1)]
    made = prompts_of_lengths(requests, [(7, 8), (7, 8, 9), (3, 4)], as_text=as_text)
    one, other, third = (p.prompt.split() if isinstance(p.prompt, str) else list(p.prompt) for p in made)
    assert (len(one), len(other), len(third)) == (1000, 1500, 600)
    assert one == other[:1000] and one[:BLOCK_TOKENS] != third[:BLOCK_TOKENS]


def test_texts_have_a_word_a_token() -> None:
    (one, *_) = prompts_of_lengths(REQUESTS, as_text=True)
    assert isinstance(one.prompt, str) and len(one.prompt.split()) == 40
    made = prompts_of_texts(REQUESTS[:2], ["hello there", "x"])
    assert [(m.prompt, m.prompt_tokens, m.due_s) for m in made] == [("hello there", 40, 0.5), ("x", 1, 1.0)]
