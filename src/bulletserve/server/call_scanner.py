"""Reads one tool call, `{"name": ..., "arguments": {...}}`, character by character as a model writes it.

Knows nothing about what stands around it. The name is known when its string ends; of the arguments every character is
passed on as it comes, so that a client sees them grow.
"""

import json

ARGUMENTS = ("arguments", "parameters")
_BLANKS = " \t\r\n"


class NoCall(Exception):
    """What has been read is no tool call."""


class CallScanner:
    """`name` is known once it is not None. `done`: the object is closed. What was read of the arguments since the last
    `take` is taken only when the name is known."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self._place = "before"  # then: key, colon, value, comma
        self._key = ""
        self._raw: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments: list[str] = []
        self._has_arguments = False

    def take(self) -> str:
        """The arguments' text since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, character: str) -> None:
        """Read one character. Raises `NoCall` where it cannot belong to a call."""
        if self._place == "value":
            self._value(character)
        elif self._place == "key" and self._raw:
            self._raw.append(character)
            if self._closes_string(character):
                self._key = self._decoded()
                self._place = "colon"
        elif character in _BLANKS:
            return
        elif self._place == "before" and character == "{":
            self._place = "key"
        elif self._place == "key" and character == '"':
            self._raw = ['"']
            self._in_string = True
        elif self._place == "colon" and character == ":":
            self._place = "value"
        else:
            raise NoCall

    def _value(self, character: str) -> None:
        """A value ends at the comma or brace behind it, blanks before that not being part of it."""
        if not self._raw and character in _BLANKS:
            return
        if not (self._in_string or self._depth) and character in ",}":
            self._end_value()
            self._place = "key"
            if character == "}":
                self._close()
            return
        self._raw.append(character)
        if self._in_string:
            self._closes_string(character)
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        if self._streams:
            self._arguments.append(character)

    @property
    def _streams(self) -> bool:
        """Whether the value that is being read is the arguments, and an object: text is decoded first."""
        return self._key in ARGUMENTS and self._raw[0] == "{" and (self._depth > 0 or self._raw[-1] == "}")

    def _end_value(self) -> None:
        if not self._raw:
            raise NoCall
        is_object = self._raw[0] == "{"
        if self._key == "name":
            name = self._decoded()
            self.name = name
        elif self._key in ARGUMENTS:
            self._has_arguments = True
            if not is_object:
                self._arguments.append(self._plain_arguments())
        self._raw = []

    def _plain_arguments(self) -> str:
        """Arguments that are no object: JSON text inside a string, as some models write them, or null."""
        try:
            value = json.loads("".join(self._raw))
        except ValueError:
            raise NoCall from None
        return value if isinstance(value, str) else "{}" if value is None else json.dumps(value)

    def _close(self) -> None:
        if not self.name:
            raise NoCall
        if not self._has_arguments:
            self._arguments.append("{}")
        self.done = True

    def _decoded(self) -> str:
        try:
            text = json.loads("".join(self._raw))
        except ValueError:
            raise NoCall from None
        if not isinstance(text, str):
            raise NoCall
        self._raw = []
        return text

    def _closes_string(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return True
        return False
