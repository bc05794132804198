"""Text that has bytes. A Python string may hold half of a surrogate pair, which no tokenizer and no file can take.

Knows nothing about where a text comes from.
"""

from bulletserve.core.errors import InvalidRequest


def check_text(text: str, param: str) -> None:
    """Raise `InvalidRequest`, with the place, for a text with half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} holds half of a surrogate pair (at character {error.start}), which is no text", param=param
        ) from None
