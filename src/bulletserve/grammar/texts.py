"""Grammars as text, from what clients write: a JSON schema, a regular expression, a list of choices.

Knows nothing about tokens. A grammar is checked where it is made, so that a client hears of its mistake before the
request goes anywhere; that can take a tenth of a second, so not on an event loop.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from bulletserve.core.errors import InvalidRequest

LONGEST_CHARACTERS = 200_000
"""Of a grammar as text."""

_SHOWN_CHARACTERS = 400

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_BLANKS = r"[\x20\x0A\x0D\x09]{1,24}"
"""Between the parts of a JSON text: room for pretty printing, but not for a model that goes on with blanks for ever."""


def limits() -> LLParserLimits:
    """What one grammar may cost: about 20 ms to begin, a few milliseconds for the worst token."""
    return LLParserLimits(verbose_errors=False)


def json_grammar(schema: Mapping[str, Any] | bool, param: str) -> str:
    """Answers that are JSON of this schema. Raises `InvalidRequest` for a schema that cannot be followed."""
    try:
        text = json.dumps(schema)
        grammar = LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_pattern": _BLANKS, "json_allow_general_unicode_escapes": True}
        )
    except (ValueError, RecursionError) as error:
        raise _refused("schema", str(error), param) from None
    return checked(grammar, "schema", param)


def regex_grammar(regex: str, param: str) -> str:
    """Answers that match a regular expression from end to end (Rust's syntax). Raises `InvalidRequest`."""
    return checked(LLMatcher.grammar_from_regex(regex), "regular expression", param)


def choice_grammar(choices: Sequence[str], param: str) -> str:
    """Answers that are one of these texts. Raises `InvalidRequest`."""
    if not choices or not all(choices):
        raise InvalidRequest(f"{param}: a choice must have texts, none of them empty", param=param)
    return regex_grammar("|".join(map(re.escape, choices)), param)


def checked(grammar: str, what: str, param: str) -> str:
    """`grammar`, if it is one that can be followed. Raises `InvalidRequest` with the reason."""
    if len(grammar) > LONGEST_CHARACTERS:
        raise InvalidRequest(f"{param}: a {what} may have about {LONGEST_CHARACTERS} characters", param=param)
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    if wrong:
        raise _refused(what, messages[0], param)
    return grammar


def _refused(what: str, reason: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: this {what} cannot be followed: {reason[:_SHOWN_CHARACTERS]}", param=param)
