"""How a request is put to one server: which endpoint, which fields.

Knows nothing about sockets. Servers differ in what they take beside the standard; a field that one refuses by name is
left out, and the notes say what that means for the figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

IGNORE_EOS, STREAM_OPTIONS = "ignore_eos", "stream_options"
_NOTES = {
    IGNORE_EOS: "the server does not take ignore_eos: answers may end before their wanted length",
    STREAM_OPTIONS: "the server does not take stream_options: tokens are counted by events, without usage",
}


@dataclass(frozen=True)
class Dialect:
    """`extra`: more fields of every body; they win over ours. `left_out`: fields of ours that the server refuses."""

    model: str
    chat: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        """Of the endpoint, below the base URL that ends in /v1."""
        return "/chat/completions" if self.chat else "/completions"

    def body(self, prompt: Sequence[int] | str, output_tokens: int) -> bytes:
        """The JSON body of one request."""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        fields = {
            "model": self.model,
            **asked,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            IGNORE_EOS: True,
            STREAM_OPTIONS: {"include_usage": True},
        }
        return msgspec.json.encode({k: v for k, v in fields.items() if k not in self.left_out} | dict(self.extra))

    def without_refused(self, message: str) -> "Dialect | None":
        """The dialect without the field that an error message complains of; None if it is none that could be left
        out."""
        for name in (IGNORE_EOS, STREAM_OPTIONS):
            if name in message and name not in self.left_out and name not in self.extra:
                return replace(self, left_out=self.left_out | {name})
        return None

    @property
    def notes(self) -> list[str]:
        """What the fields that were left out mean for the figures."""
        return [_NOTES[name] for name in sorted(self.left_out)]
