"""The bytes between the front and the engine: one kind byte, then msgpack of a frozen dataclass.

Knows nothing about sockets. Both ends are of the same version (the front starts the engine), so there is no
version field; bytes that are no message of ours are `BadMessage`, which the receivers log and drop.
"""

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import msgspec

from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.events import CacheReset, Output, Status, Stop
from bulletserve.core.request import Request


class BadMessage(Exception):
    """Bytes that are no message of this direction."""


@dataclass(frozen=True, slots=True)
class Submit:
    """New requests, all from one HTTP call, in the order of their ids. Their `block_hashes` are empty."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody waits for these any more."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fatal:
    """The engine's last words."""

    message: str


ToEngine: TypeAlias = Submit | Abort | CacheReset | Stop
ToFront: TypeAlias = Output | Status | EngineInfo | Fatal

M = TypeVar("M")


class Codec(Generic[M]):
    """Turns the messages of one direction into bytes and back. One thread at a time per instance."""

    def __init__(self, *kinds: type[M]) -> None:
        self._numbers = {kind: bytes((number,)) for number, kind in enumerate(kinds)}
        self._decoders = [msgspec.msgpack.Decoder(kind) for kind in kinds]
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, message: M) -> bytes:
        """The message's bytes."""
        return self._numbers[type(message)] + self._encode(message)

    def decode(self, data: bytes) -> M:
        """The message in `data`. Raises `BadMessage`."""
        if not data or data[0] >= len(self._decoders):
            raise BadMessage(f"{len(data)} bytes of no known kind")
        try:
            return self._decoders[data[0]].decode(memoryview(data)[1:])
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
            raise BadMessage(f"{len(data)} bytes of kind {data[0]}: {error}") from None


def to_engine_codec() -> Codec[ToEngine]:
    """A codec for what the front says."""
    return Codec[ToEngine](Submit, Abort, CacheReset, Stop)


def to_front_codec() -> Codec[ToFront]:
    """A codec for what the engine says."""
    return Codec[ToFront](Output, Status, EngineInfo, Fatal)
