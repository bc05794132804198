"""What is asked: prompts of wanted lengths, as token ids or as words, the same for the same salt.

Knows nothing about servers. Without a tokenizer a text of n tokens can only be aimed at: each word here is one token in
the vocabularies of the large models, and what the server counts is what is reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bulletserve.workload.request_list import RequestLengths
from bulletserve.workload.traces import BLOCK_TOKENS

LOW_ID, HIGH_ID = 1000, 32000
"""Token ids are drawn from LOW_ID to HIGH_ID - 1: nearly every vocabulary has these, and no special ones among them."""

_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother", "area",
    "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue",
    "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member",
    "law", "car", "city", "community", "name", "president", "team", "minute", "idea", "body", "information",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """One request: due `due_s` after the start, to be answered with exactly `output_tokens` tokens.

    `prompt`: token ids, or text. `prompt_tokens`: as wanted; the server may count otherwise.
    """

    number: int
    due_s: float
    prompt: Sequence[int] | str
    prompt_tokens: int
    output_tokens: int


def prompts_of_lengths(
    requests: Sequence[RequestLengths],
    blocks: Sequence[Sequence[int]] = (),
    *,
    as_text: bool,
    ids: tuple[int, int] = (LOW_ID, HIGH_ID),
    salt: Sequence[int] = (0,),
) -> list[TimedPrompt]:
    """A prompt for each request, numbered from 0 in their order.

    `blocks`: the names of the blocks of BLOCK_TOKENS tokens that each prompt consists of; blocks of one name are equal
    wherever they are, so that prefixes are shared as they were recorded. Without, no two prompts have a prefix in
    common but by chance, nor have those of two salts: what a server remembers of one run is no help in another.
    """
    low, high = (0, len(_WORDS)) if as_text else ids
    made: list[TimedPrompt] = []
    for number, one in enumerate(requests):
        if blocks:
            parts = [
                np.random.default_rng([*salt, 1, name]).integers(low, high, BLOCK_TOKENS) for name in blocks[number]
            ]
            drawn = np.concatenate(parts)[: one.prompt_tokens].tolist()
        else:
            drawn = np.random.default_rng([*salt, 0, number]).integers(low, high, one.prompt_tokens).tolist()
        prompt = " ".join(_WORDS[at] for at in drawn) if as_text else drawn
        made.append(TimedPrompt(number, one.arrival_s, prompt, one.prompt_tokens, one.output_tokens))
    return made


def prompts_of_texts(requests: Sequence[RequestLengths], texts: Sequence[str]) -> list[TimedPrompt]:
    """A prompt for each request, in their order, that is one of these texts."""
    return [
        TimedPrompt(number, one.arrival_s, text, one.prompt_tokens, one.output_tokens)
        for number, (one, text) in enumerate(zip(requests, texts, strict=True))
    ]
