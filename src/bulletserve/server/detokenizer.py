"""From token ids to text as they come, one answer at a time.

Knows nothing about HTTP. What it gives, joined, is the decoding of all ids: bytes that do not yet make a character
are held back, and so is text that may become a stop string. A token costs the same however long the answer is.
"""

import codecs
from collections.abc import Sequence

from bulletserve.server.stop_strings import StopStrings
from bulletserve.server.token_bytes import Piece, begins_text


class Detokenizer:
    """The text of one answer.

    `pieces` is the tokenizer's table. `tail` are bytes of an unfinished character at the end of the prompt: if the
    answer completes that character it is shown, and nothing else of the prompt ever is. Once `matched` is set, the
    text before the stop string (with it, where `keep_stop`) has been given and the answer is over. The text of the
    first `min_tokens` tokens is not searched for stop strings.
    """

    __slots__ = ("_open", "_pieces", "_stops", "_tail", "_unsearched")

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        stop: Sequence[str] = (),
        keep_stop: bool = False,
        min_tokens: int = 0,
        tail: bytes = b"",
    ) -> None:
        self._pieces = pieces
        self._stops = StopStrings(stop, keep=keep_stop) if stop else None
        self._unsearched = min_tokens if stop else 0
        self._open = b""
        self._tail = tail

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer."""
        return None if self._stops is None else self._stops.matched

    @property
    def is_open(self) -> bool:
        """Whether the last token left a character unfinished."""
        return bool(self._open)

    def push(self, token_id: int) -> str:
        """The text that can be shown now that this token has followed; often empty. Unknown ids add nothing."""
        piece = self._pieces[token_id] if token_id < len(self._pieces) else ""
        searched = self._stops
        if self._unsearched:
            self._unsearched -= 1
            searched = None
        if not piece:
            return ""
        if self._open or self._tail or isinstance(piece, bytes):
            piece = self._decode(piece if isinstance(piece, bytes) else piece.encode())
        return piece if searched is None else searched.push(piece)

    def finish(self) -> str:
        """What was held back, at the end: unfinished bytes as U+FFFD. May set `matched`."""
        text, self._open = self._open.decode(errors="replace"), b""
        if self._stops is None:
            return text
        text = self._stops.push(text)
        return text if self._stops.matched else text + self._stops.rest()

    def _decode(self, data: bytes) -> str:
        if self._tail:
            tail, self._tail = self._tail, b""
            data = tail + data if begins_text(tail + data[:1]) else data
        data = self._open + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._open = data[used:]
        return text
