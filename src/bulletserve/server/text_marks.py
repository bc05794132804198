"""Keeps what users write apart from what a chat template writes, so that a user's `<|im_end|>` ends nothing.

Knows nothing about templates. The tokenizer sees one text, the template's and the user's mixed. So wherever a control
token begins in a user's text, a mark is put behind its first character before the template runs: then no control token
is left but the template's own. A stretch between two of those that has a mark is encoded as characters only.
"""

import re
from typing import Any, TypeAlias

from bulletserve.server.tokenizer import Tokenizer

Json: TypeAlias = Any

_MARK = "\ufdd0"
"""A noncharacter of Unicode, for use inside programs."""


class TextMarks:
    """Marks and encodes for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = [re.escape(text) for text in tokenizer.special_texts if len(text) > 1]
        either = "|".join(sorted(texts, key=len, reverse=True)) or r"(?!)"
        self._control = re.compile(f"({either})")
        self._beginning = re.compile(f"(?={either})(.)", re.DOTALL)

    def mark(self, value: Json) -> Json:
        """`value` with every string in it marked."""
        if isinstance(value, str):
            return self._beginning.sub(rf"\1{_MARK}", value.replace(_MARK, _MARK * 2))
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        if isinstance(value, dict):
            return {key: self.mark(item) for key, item in value.items()}
        return value

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text with marks: as ever where there are none, and without the marks where there are."""
        if _MARK not in text:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids = self._tokenizer.encode("", add_special_tokens=True) if add_special_tokens else []
        plain = ""
        for stretch in self._control.split(text):
            if _MARK in stretch:
                ids += self._tokenizer.encode(plain, add_special_tokens=False) if plain else []
                ids += self._tokenizer.encode_as_text(re.sub(f"{_MARK}({_MARK}?)", r"\1", stretch))
                plain = ""
            else:
                plain += stretch
        return ids + (self._tokenizer.encode(plain, add_special_tokens=False) if plain else [])
