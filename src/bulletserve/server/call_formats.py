"""The formats in which models call tools by themselves, by the names of `--tool-call-parser`.

Knows nothing about grammars.
"""

from collections.abc import Mapping
from typing import NamedTuple

from bulletserve.server.tool_calls import JsonReader, MakeReader, MarkedReader, Part, Reader


class CallFormat(NamedTuple):
    """`make_reader`: finds the calls in an answer. `marks`: what is written around each; None where a call may look as
    an answer does."""

    make_reader: MakeReader
    marks: tuple[str, str] | None = None


class EitherReader:
    """Calls from the first character on, behind their mark `opening`, or no call at all: what a grammar allows that has
    calls beside answers. Nothing of a call that is cut off is content."""

    def __init__(self, inner: Reader, opening: str) -> None:
        self._inner = inner
        self._opening = opening
        self._held = ""
        self._calls: bool | None = None

    def push(self, text: str) -> list[Part]:
        """See `Reader`."""
        if self._calls is None:
            text = self._held = self._held + text
            if len(text) < len(self._opening) and self._opening.startswith(text):
                return []
            self._calls = text.startswith(self._opening)
        if self._calls:
            return self._inner.push(text)
        return [text] if text else []

    def finish(self) -> list[Part]:
        """See `Reader`."""
        if self._calls is None:
            return [self._held] if self._held else []
        return [part for part in self._inner.finish() if not isinstance(part, str)] if self._calls else []


_MARKED = CallFormat(MarkedReader, (MarkedReader.OPEN, MarkedReader.CLOSE))

FORMATS: Mapping[str, CallFormat] = {"hermes": _MARKED, "qwen": _MARKED, "llama3_json": CallFormat(JsonReader)}
