"""Finds the tool calls in an answer's text as it grows.

Knows nothing about HTTP. Models write calls in a format of their own (`call_formats`); answers kept by a grammar are a
list of calls, or one call's arguments. Text that only may become a call is held back until that is certain; of a call
the name comes first, then its arguments piece by piece.
"""

import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeAlias

from bulletserve.server.call_scanner import CallScanner, NoCall


class CallStart(NamedTuple):
    """A call begins: number `call` of the answer."""

    call: int
    id: str
    name: str


class CallText(NamedTuple):
    """The arguments of number `call` go on with `text`."""

    call: int
    text: str


Part: TypeAlias = str | CallStart | CallText
"""What an answer consists of; a string is content."""


class Reader(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> list[Part]:
        """The answer goes on with `text`."""

    def finish(self) -> list[Part]:
        """The answer has ended: what was held back."""


MakeReader: TypeAlias = Callable[[], Reader]


class Calls:
    """The calls of one answer, one after the other, fed with the characters between marks."""

    def __init__(self) -> None:
        self.count = 0
        self._scanner: CallScanner | None = None
        self._started = False
        self._raw: list[str] = []

    @property
    def inside(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._scanner is not None

    def begin(self, before: str = "") -> None:
        """What comes next is a call; if it turns out to be none, `before` was content too."""
        self._scanner, self._started, self._raw = CallScanner(), False, [before]

    def feed(self, character: str, parts: list[Part]) -> None:
        """One character of the call. Raises `NoCall`, with all its text, where it turns out to be none."""
        assert self._scanner is not None
        scanner = self._scanner
        self._raw.append(character)
        try:
            scanner.feed(character)
        except NoCall:
            if not self._started:
                raise NoCall(self.give_up()) from None
            self._scanner = None  # its beginning is told already: what is left is no content either
            return
        if not self._started and scanner.name:
            self._started = True
            parts.append(CallStart(self.count, f"call_{uuid.uuid4().hex[:24]}", scanner.name))
            self.count += 1
        if self._started and (text := scanner.take()):
            if parts and isinstance(last := parts[-1], CallText):
                text = last.text + text
                parts.pop()
            parts.append(CallText(self.count - 1, text))
        if scanner.done:
            self._scanner = None

    def give_up(self) -> str:
        """The answer ends, or this is no call: its text, if nothing of it has been told."""
        self._scanner = None
        return "" if self._started else "".join(self._raw)


class MarkedReader:
    """Hermes and Qwen: free text, and calls between `<tool_call>` and `</tool_call>`."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._calls = Calls()
        self._held = ""
        self._skips_close = False

    def push(self, text: str) -> list[Part]:
        """See `Reader`."""
        parts: list[Part] = []
        for character in text:
            if self._calls.inside:
                try:
                    self._calls.feed(character, parts)
                    self._skips_close = not self._calls.inside
                except NoCall as none:
                    parts.append(str(none))
            else:
                self._held += character
                if self._held.endswith(self.OPEN):
                    content = self._held[: -len(self.OPEN)].rstrip()
                    self._let_go(parts, content)
                    self._calls.begin(self._held[len(content) :])
                    self._held = ""
                elif self._skips_close and self._held.strip() == self.CLOSE:
                    self._held, self._skips_close = "", False
        if not self._calls.inside:
            free = self._held[: len(self._held) - self._kept()]
            self._held = self._held[len(free) :]
            self._let_go(parts, free)
        return parts

    def finish(self) -> list[Part]:
        """See `Reader`."""
        parts: list[Part] = []
        if self._calls.inside:
            self._let_go(parts, self._calls.give_up())
        if self._held.strip() or not self._calls.count:
            self._let_go(parts, self._held)
        self._held = ""
        return parts

    def _let_go(self, parts: list[Part], text: str) -> None:
        if text:
            parts.append(text)

    def _kept(self) -> int:
        """Characters at the end of what is held that may belong to a mark: blanks before one do."""
        held = self._held
        marks = (self.OPEN, self.CLOSE) if self._skips_close else (self.OPEN,)
        sizes = (size for mark in marks for size in range(1, len(mark)) if held.endswith(mark[:size]))
        most = max(sizes, default=0)
        rest = held[: len(held) - most]
        return len(held) - len(rest.rstrip())


class JsonReader:
    """Llama 3: the answer is one call or several, divided by semicolons or commas, or it is free text."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._calls = Calls()
        self._is_text = False
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """See `Reader`."""
        parts: list[Part] = []
        for place, character in enumerate(text):
            if self._is_text:
                parts.append(text[place:])
                break
            if self._calls.inside:
                try:
                    self._calls.feed(character, parts)
                except NoCall as none:
                    self._is_text = True
                    parts.append(str(none))
            else:
                self._between(character, parts)
        return parts

    def finish(self) -> list[Part]:
        """See `Reader`."""
        raw = self._calls.give_up() if self._calls.inside else ""
        text = raw or ("" if self._calls.count else self._held)
        self._held = ""
        return [text] if text else []

    def _between(self, character: str, parts: list[Part]) -> None:
        """Before the first call, or after one."""
        self._held += character
        opening = self._held.strip(" \t\r\n;," if self._calls.count else " \t\r\n").removeprefix(self.TAG).lstrip()
        if opening == "{":
            self._calls.begin(self._held[:-1])
            self._held = ""
            self._calls.feed(character, parts)
        elif opening and not self.TAG.startswith(opening):
            self._is_text = True
            parts.append(self._held)
            self._held = ""


class ListReader:
    """A JSON list of calls and nothing else: what the grammar of "required" allows. None of it is content, wherever it
    is cut off."""

    def __init__(self) -> None:
        self._calls = Calls()

    def push(self, text: str) -> list[Part]:
        """See `Reader`."""
        parts: list[Part] = []
        for character in text:
            if not self._calls.inside and character == "{":
                self._calls.begin()
            if self._calls.inside:
                with suppress(NoCall):
                    self._calls.feed(character, parts)
        return parts

    def finish(self) -> list[Part]:
        """See `Reader`."""
        return []


class NamedReader:
    """All of the answer is the arguments of one tool."""

    def __init__(self, name: str) -> None:
        self._start: CallStart | None = CallStart(0, f"call_{uuid.uuid4().hex[:24]}", name)

    def push(self, text: str) -> list[Part]:
        """See `Reader`."""
        start, self._start = self._start, None
        parts: list[Part] = [] if start is None else [start]
        return [*parts, CallText(0, text)]

    def finish(self) -> list[Part]:
        """See `Reader`."""
        return []


class CallReader:
    """Another reader's parts, of calls at most the first `most` (None: all)."""

    def __init__(self, inner: Reader, most: int | None) -> None:
        self._inner = inner
        self._most = most

    def push(self, text: str) -> list[Part]:
        """See `Reader`."""
        return self._limited(self._inner.push(text))

    def finish(self) -> list[Part]:
        """See `Reader`."""
        return self._limited(self._inner.finish())

    def _limited(self, parts: list[Part]) -> list[Part]:
        if self._most is None:
            return parts
        return [part for part in parts if isinstance(part, str) or part.call < self._most]
