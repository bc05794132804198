"""JSON from files that anybody may have written, with one kind of failure.

Knows nothing about what is in them. The library's reader takes NaN and Infinity, which JSON has no words for, and fails
in other ways than `ValueError` where lists are nested as deeply as nobody means it.
"""

import json
from typing import Any


def parse_json(text: str) -> Any:
    """The value in `text`. Raises `ValueError` for whatever is no JSON."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")
