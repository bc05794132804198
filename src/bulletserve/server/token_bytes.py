"""The bytes that each token id stands for.

Knows nothing about requests. In every tokenizer that we run a token's bytes do not depend on its neighbours, so an
answer's text is the UTF-8 decoding of its tokens' bytes, one after the other, and a detokenizer is a table look-up.
What does depend on place is left out: SentencePiece drops a blank at the start of a text, but an answer is the
continuation of a prompt and keeps it. Where byte tokens form no UTF-8, the valid characters among them survive and
only the rest becomes U+FFFD (the tokenizers library replaces the whole run).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from bulletserve.core.errors import UnsupportedModel

Piece: TypeAlias = str | bytes
"""What a token adds to an answer: text, or bytes that are no UTF-8 by themselves."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK = "\u2581"


def _byte_level_alphabet() -> dict[int, int]:
    """Byte-level BPE's character for each byte: itself where it prints, else one from U+0100 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in printing)
    return {byte: byte for byte in printing} | {0x100 + n: byte for n, byte in enumerate(hidden)}


_BYTES = {chr(character): byte for character, byte in _byte_level_alphabet().items()}


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:  # an added token, written as it is
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace(_BLANK, " ").encode()


_READERS = {"ByteLevel": _byte_level, "ByteFallback": _sentence_piece, "Metaspace": _sentence_piece}
_NO_BYTES_OF_THEIR_OWN = {"Replace", "Fuse", "Strip"}


def token_pieces(tokens: Mapping[int, str], decoders: Iterable[str]) -> list[Piece]:
    """The piece of every id up to the highest, empty where there is no token.

    `decoders` are the names of the tokenizer's decoding steps. Raises `UnsupportedModel` for steps that we cannot
    reduce to bytes per token.
    """
    steps = list(decoders)
    known = [_READERS[step] for step in steps if step in _READERS]
    if len(known) != 1 or any(step not in _READERS and step not in _NO_BYTES_OF_THEIR_OWN for step in steps):
        raise UnsupportedModel(
            f"the tokenizer decodes by {', '.join(steps) or 'nothing'}; "
            "byte-level and SentencePiece tokenizers are served"
        )
    pieces: list[Piece] = [""] * (max(tokens, default=-1) + 1)
    for token_id, token in tokens.items():
        pieces[token_id] = _text_if_whole(known[0](token))
    return pieces


def _text_if_whole(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def open_character(pieces: Sequence[Piece], ids: Sequence[int]) -> bytes:
    """The bytes at the end of a prompt that begin a character and do not end it; empty if there are none."""
    tail = b""
    for token_id in reversed(ids[-3:]):
        piece = pieces[token_id] if 0 <= token_id < len(pieces) else ""
        if isinstance(piece, str):
            break
        tail = piece + tail
    for start in range(max(0, len(tail) - 3), len(tail)):
        if begins_text(tail[start:]) and isinstance(_text_if_whole(tail[start:]), bytes):
            return tail[start:]
    return b""


def begins_text(data: bytes) -> bool:
    """Whether `data` is UTF-8, or would be if its one unfinished character went on."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return True
