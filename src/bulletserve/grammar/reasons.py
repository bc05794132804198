"""What the grammar library finds wrong, in words for whoever wrote the grammar, with the place where it is known.

Knows nothing about requests. The library's own texts name its parts and settings, point into what we made of a grammar,
and repeat it; what is not known here is cut down to its first line.
"""

import re
from collections.abc import Iterator
from typing import Any

_SHOWN_CHARACTERS = 300

_TOO_COMPLEX = (
    "it allows too many different texts at once: use fewer or smaller repetitions, above all none inside another, "
    "fewer optional properties or alternatives, or write a rule that repeats as rest*, not as item rest"
)
_TOO_LARGE = "it is too large: use fewer rules, alternatives or repetitions"

_WORDS = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), words)
    for pattern, words in (
        (r"row has \d+ items|lexer.*too (big|large|complex)|fuel|unable to determine", _TOO_COMPLEX),
        (r"too many (items|states|expressions)", _TOO_COMPLEX),
        (r"grammar size|too many (rules|symbols|grammars)", _TOO_LARGE),
        (r"NoExtensionBias", "no text fits it"),
        (r"unimplemented keys: (?P<a>\[[^]]*\])", "these keywords are not supported: {a}"),
        (r"^(?:failed to compile JSON schema: )?invalid type: (?P<a>\S+)", 'there is no type "{a}"'),
        (r"unknown format: (?P<a>\S+)", 'the format "{a}" is not supported'),
        (r"anyOf is empty", "no value fits it: there is nothing to choose from"),
        (r"expecting object schema", "no value fits it"),
        (r"unsatisfiable schema: (?P<a>[^\n]*)", "no value fits it: {a}"),
        (r"pointer '(?P<a>[^']*)' does not exist", "$ref: there is no {a} in it"),
        (r"resource '(?P<a>[^']*)' is not present", "$ref: {a} is not part of it, and nothing is fetched"),
        (r"regex parse error:\n(?:    (?P<shown>[^\n]*)\n    (?P<before> *)\^+ *\n)?.*?error: (?P<a>[^\n]*)", "{a}"),
        (r"^lexer error", "what begins here is no part of a grammar"),
        (r"no tokenizer", "a grammar cannot name special tokens"),
        (r'unknown name: "(?P<a>[^"]*)"', "there is no rule {a}"),
        (r"from GBNF to Lark: rule '(?P<a>[^']*)' not found", "there is no rule {a}"),
        (r"from GBNF to Lark: (?P<a>[^\n,]*?)(?: at line (?P<line>\d+))?(?:,|\n|$)", "{a}"),
    )
)
_PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ")
_ESCAPED = re.compile(r"\\[n/]")
"""The library shows a regular expression in one line and between slashes: what it may have put there moves places."""

_INSIDE = re.compile(r"<non-verbose/>|^(?:parser|lexer) error: ", re.IGNORECASE)


def reason(message: str, *, written: bool = False) -> str:
    """Why a grammar cannot be followed, of the library's `message`. `written`: its places are those of the client's own
    text."""
    message = _INSIDE.sub("", message.strip()).strip()
    place = ""
    if at := _PLACE.match(message):
        message = message[at.end() :]
        place = f"line {at['line']}, column {at['column']}: " if written else ""
    for pattern, words in _WORDS:
        if found := pattern.search(message):
            named = found.groupdict()
            if named.get("shown") and not _ESCAPED.search(named["shown"]):
                place = f"{place}at character {len(named['before']) + 1}: "
            elif named.get("line"):
                place = f"line {named['line']}: "
            return place + words.format(a=(named.get("a") or "")[:_SHOWN_CHARACTERS])
    return place + message.partition("\n")[0][:_SHOWN_CHARACTERS]


def place_in_schema(schema: Any, message: str) -> str:
    """Where in a schema the keyword, type or format stands that the library's `message` names, as "#/items/not"; "" for
    none, or for several of which any may be meant."""
    for pattern, key in _IN_SCHEMA:
        found = re.search(pattern, message)
        if found is None:
            continue
        try:
            several = tuple(_keywords(schema, "#"))
        except RecursionError:
            return ""
        if key is None:
            places = [path for path, name, _ in several if name == found[1]]
        else:
            places = [path for path, name, value in several if (name, value) == (key, found[1])]
        return places[0] if len(places) == 1 else ""
    return ""


_IN_SCHEMA = (
    (r'Unimplemented keys: \["([^"]*)"', None),
    (r"Invalid type: (\S+)", "type"),
    (r"Unknown format: (\S+)", "format"),
)
NAMES = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose values have names for keys, and schemas behind them."""

QUOTED = frozenset(("enum", "const", "default", "examples"))
"""Keywords whose values are no schemas."""


def _keywords(schema: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """The keywords of a schema and its parts, with their places; what it only quotes or names is none."""
    if isinstance(schema, list):
        for number, one in enumerate(schema):
            yield from _keywords(one, f"{path}/{number}")
    elif isinstance(schema, dict):
        for name, value in schema.items():
            here = f"{path}/{name}"
            yield here, name, value
            if name in NAMES and isinstance(value, dict):
                for inner, one in value.items():
                    yield from _keywords(one, f"{here}/{inner}")
            elif name not in QUOTED:
                yield from _keywords(value, here)
