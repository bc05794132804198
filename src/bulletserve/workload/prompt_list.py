"""Lists of real prompts: what is asked, when, and how long the answer is to be.

Knows nothing about tokens. One JSON object a line with `arrival` (seconds), `messages` (a chat) and `max_tokens`.
"""

from dataclasses import dataclass
from pathlib import Path

from bulletserve.core.errors import ConfigError
from bulletserve.core.json_text import parse_json

Message = dict[str, str]

LATEST_S = 86400.0
"""Latest arrival."""


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
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            messages = tuple({"role": str(m["role"]), "content": str(m["content"])} for m in row["messages"])
            prompt = ChatPrompt(float(row["arrival"]), messages, row["max_tokens"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ConfigError(f"{path}, line {number}: not a prompt ({error!r})") from None
        if type(prompt.max_tokens) is not int or prompt.max_tokens < 1:
            raise ConfigError(f"{path}, line {number}: max_tokens must be a whole number of at least 1")
        if not 0 <= prompt.arrival_s < LATEST_S or not messages:
            raise ConfigError(f"{path}, line {number}: arrival must be from 0 to {LATEST_S:g} s, messages not empty")
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return tuple(prompts)
