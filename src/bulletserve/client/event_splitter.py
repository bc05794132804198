"""Cuts a stream of bytes into server-sent events, wherever the network cut it.

Knows nothing about what events say. Lines end with LF or CR LF, an event with an empty line; `data` may be spread over
lines; comments and other fields are skipped. (Lines that end with CR alone are in the standard, and nobody sends them.)
"""

import re

MOST_BYTES = 1 << 22
"""Longest event; a token's has a few hundred bytes."""

_END = re.compile(rb"\r?\n\r?\n")


class EventSplitter:
    """Fed with bytes, returns the `data` of the events that they complete."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept = b""

    @property
    def overflowed(self) -> bool:
        """Whether an event has become longer than any honest one."""
        return len(self._kept) > MOST_BYTES

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that is complete now; events without data are left out."""
        text = self._kept + data if self._kept else data
        if b"\r" not in text:  # nearly always, and several times quicker
            *ended, self._kept = text.split(b"\n\n")
        else:
            *ended, self._kept = _END.split(text)
        return [payload for event in ended if (payload := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly all of them
        return event[6:]
    parts = []
    for line in event.splitlines():
        name, _, value = line.partition(b":")
        if name == b"data":
            parts.append(value.removeprefix(b" "))
    return b"\n".join(parts) if parts else None
