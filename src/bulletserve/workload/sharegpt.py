"""Prompts that people wrote: files in the form of ShareGPT, a JSON list of conversations.

Knows nothing about tokens: a text's length is counted by whoever has the tokenizer, or estimated here. Each entry has
`conversations`, a list of `from` and `value` (also `role` and `content`); the first thing that a human says is the
prompt, what is said next is the answer. Entries without both are left out.

The usual file, ShareGPT_V3_unfiltered_cleaned_split.json, is a collection of chats that users had shared in public; its
collectors put it under Apache-2.0. It is read where you have it, and never shipped or quoted here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bulletserve.core.errors import ConfigError
from bulletserve.core.json_text import parse_json

CHARACTERS_PER_TOKEN = 4
"""Of English text, roughly: what an estimate goes by."""

_HUMAN = ("human", "user")
_ANSWERERS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")


@dataclass(frozen=True, slots=True)
class Exchange:
    """What somebody asked and what was answered."""

    prompt: str
    answer: str


def read_sharegpt(path: Path) -> tuple[Exchange, ...]:
    """Read a JSON list (or JSON lines) of conversations. Raises `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        entries = parse_json(text) if text.lstrip().startswith("[") else [parse_json(s) for s in text.splitlines() if s]
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON list of conversations: {error}") from None
    found = tuple(_exchanges(entries))
    if not found:
        raise ConfigError(f"{path} holds no conversation in which a human asks first and is answered")
    return found


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has."""
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))


def _exchanges(entries: list[Any]) -> Iterator[Exchange]:
    for entry in entries:
        turns = entry.get("conversations", entry.get("messages")) if isinstance(entry, dict) else None
        said = [_turn(turn) for turn in turns[:2]] if isinstance(turns, list) else []
        if len(said) == 2:
            (first, prompt), (second, answer) = said
            if first in _HUMAN and second in _ANSWERERS and prompt.strip() and answer.strip():
                yield Exchange(prompt, answer)


def _turn(turn: Any) -> tuple[str, str]:
    """Who spoke, and what."""
    if not isinstance(turn, dict):
        return "", ""
    return str(turn.get("from", turn.get("role"))), str(turn.get("value", turn.get("content")) or "")
