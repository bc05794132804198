"""Typed look-ups in what a file says about itself: a JSON object or GGUF metadata.

Knows nothing about which fields exist. A field that is null counts as absent; one of the wrong type, or a
required one that is absent, is a `BrokenCheckpoint` that names file and field.
"""

import math
from collections.abc import Mapping
from typing import TypeVar

from bulletserve.core.errors import BrokenCheckpoint

T = TypeVar("T")


class Fields:
    """A read-only mapping from a file. `where` names the file, `prefix` is put before every field's name."""

    def __init__(self, values: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.where = where
        self._values = values
        self._prefix = prefix

    def raw(self, name: str) -> object:
        """The value as it stands in the file; None if absent."""
        return self._values.get(self._prefix + name)

    def has(self, name: str) -> bool:
        """Whether the field is there at all, null included."""
        return self._prefix + name in self._values

    def wrong(self, name: str, expected: str) -> BrokenCheckpoint:
        """The error for a field that is absent or is not what was `expected`."""
        value = self.raw(name)
        found = "absent" if value is None else f"{value!r:.60}"
        return BrokenCheckpoint(f"{self.where}: {self._prefix}{name} must be {expected}, but is {found}")

    def optional_integer(self, name: str) -> int | None:
        """A whole number. Floats without a fraction are accepted: some writers store 8192.0."""
        value = self.raw(name)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self.wrong(name, "an integer")

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number, required unless there is a default."""
        value = self.optional_integer(name)
        value = default if value is None else value
        if value is None:
            raise self.wrong(name, "an integer")
        return value

    def optional_number(self, name: str) -> float | None:
        """A finite number."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        try:
            number = float(value)
        except OverflowError:
            raise self.wrong(name, "a number that fits a double") from None
        if not math.isfinite(number):
            raise self.wrong(name, "a finite number")
        return number

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number, required unless there is a default."""
        value = self.optional_number(name)
        value = default if value is None else value
        if value is None:
            raise self.wrong(name, "a number")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def optional_text(self, name: str) -> str | None:
        """A string."""
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(name, "a string")

    def text(self, name: str) -> str:
        """A string, required."""
        value = self.optional_text(name)
        if value is None:
            raise self.wrong(name, "a string")
        return value

    def table(self, name: str) -> dict[str, object]:
        """A nested object; empty if absent."""
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def items(self, name: str, kind: type[T]) -> tuple[T, ...]:
        """A list whose elements are all of `kind` exactly; empty if absent."""
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.wrong(name, f"a list of {kind.__name__}")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them, without repeats, in the file's order; empty if absent."""
        value = self.raw(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(id_) is int and id_ >= 0 for id_ in ids):
            raise self.wrong(name, "a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))
