"""Where a long text may be cut, if only the tokens of its end are wanted: the ids behind are those of the whole text.

Knows nothing about models. The splits that come before BPE read a text from left to right, and none of their parts
reaches from a character that is no blank over the blank behind it; nor does composition (NFC). So what follows such a
place does not depend on what comes before it. Tokenizers of which that is not known are not cut for.
"""

import json
import re
from collections.abc import Iterator

from tokenizers import Tokenizer as Backend

LETTERS_AND = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen 2 cut texts, but for their numbers."""

NUMBERS = (r"\p{N}{1,3}", r"\p{N}")
"""Theirs."""

_KNOWN_SPLITS = frozenset(LETTERS_AND % numbers for numbers in NUMBERS)
_CUT = re.compile(r"[^\W_](?= )")
_WINDOW_CHARACTERS = 4096
_CHARACTERS_PER_TOKEN = 6
_AT_LEAST_CHARACTERS = 1000


def can_be_cut_for(backend: Backend) -> bool:
    """Whether texts may be cut for this tokenizer."""
    normalizer = None if backend.normalizer is None else json.loads(backend.normalizer.__getstate__())["type"]
    if normalizer not in (None, "NFC") or backend.pre_tokenizer is None:
        return False
    if any(
        token.rstrip or token.single_word or _CUT.search(token.content)
        for token in backend.get_added_tokens_decoder().values()
    ):
        return False
    steps = list(_steps(json.loads(backend.pre_tokenizer.__getstate__())))
    return all(map(_is_known, steps)) and any(step["type"] == "Split" or step.get("use_regex") for step in steps)


def _steps(part: dict[str, object]) -> Iterator[dict[str, object]]:
    inner = part.get("pretokenizers")
    if isinstance(inner, list):
        for step in inner:
            yield from _steps(step)
    else:
        yield part


def _is_known(step: dict[str, object]) -> bool:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False} | {"type": "Digits"}:
            return True
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return pattern in _KNOWN_SPLITS
    return False


def ends(text: str, tokens: int) -> Iterator[str]:
    """Longer and longer ends of `text`, the first likely to have `tokens` tokens; at last the whole."""
    characters = _CHARACTERS_PER_TOKEN * tokens + _AT_LEAST_CHARACTERS
    while 2 * characters < len(text):
        about = len(text) - characters
        if cut := _CUT.search(text, about, about + _WINDOW_CHARACTERS):
            yield text[cut.end() :]
        characters *= 4
    yield text
