"""Lists of real prompts: what is asked, when, and how long the answer is to be.

Knows nothing about tokens. One JSON object a line with `arrival` (seconds), `messages` (a chat) and `max_tokens`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from bulletserve.core.errors import ConfigError

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """One conversation to be answered with exactly `max_tokens` tokens, asked `arrival_s` after the start."""

    arrival_s: float
    messages: tuple[Message, ...]
    max_tokens: int


def read_prompt_list(path: Path) -> tuple[ChatPrompt, ...]:
    """Read a JSONL file. Raises `ConfigError` with the line number for a line that is none."""
    prompts: list[ChatPrompt] = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            messages = tuple({"role": str(m["role"]), "content": str(m["content"])} for m in row["messages"])
            prompts.append(ChatPrompt(float(row["arrival"]), messages, int(row["max_tokens"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: not a prompt ({error!r})") from None
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return tuple(prompts)
