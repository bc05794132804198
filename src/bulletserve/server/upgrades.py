"""A request without its wish to go on in another protocol.

Knows nothing about those: whoever asks to be upgraded (h2c, WebSocket) must be ready to be answered in HTTP/1.1.
"""

from collections.abc import Sequence
from typing import Protocol


class Parsed(Protocol):
    """What a parser knows once the headers are complete."""

    def get_method(self) -> bytes: ...
    def get_http_version(self) -> str: ...


def without_upgrade(parsed: Parsed, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The head of the same request, to be parsed again."""
    lines = [b"%s %s HTTP/%s" % (parsed.get_method(), url, parsed.get_http_version().encode())]
    for name, value in headers:
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            value = b", ".join(token for token in tokens if token.lower() not in (b"upgrade", b"http2-settings"))
        if name not in (b"upgrade", b"http2-settings") and (value or name != b"connection"):
            lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])
