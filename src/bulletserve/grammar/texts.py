"""Grammars as text, from what clients write: a JSON schema, a regular expression, a list of choices, a grammar.

Knows nothing about tokens. A grammar is checked where it is made, so that a client hears of its mistake before the
request goes anywhere; that can take a tenth of a second, so not on an event loop.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, grammar_from

from bulletserve.core.errors import InvalidRequest
from bulletserve.core.whole_text import check_text
from bulletserve.grammar.multiples import too_many_multiples, too_many_written
from bulletserve.grammar.reasons import place_in_schema, reason

LONGEST_CHARACTERS = 200_000
"""Of a grammar as text."""

LONGEST_WRITTEN_CHARACTERS = 20_000
"""Of a grammar as a client writes it: so much GBNF takes half a second to turn into Lark, twice as much two."""

LIGHT_CHARACTERS = 6000
"""Grammars as text up to this take some milliseconds to compile, four times as much twenty times as long."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_BLANKS = r"[\x20\x0A\x0D\x09]{1,24}"
"""Between the parts of a JSON text: room for pretty printing, but not for a model that goes on with blanks for ever."""


def limits() -> LLParserLimits:
    """What one grammar may cost: about 20 ms to begin, a few milliseconds for the worst token."""
    return LLParserLimits(verbose_errors=False)


def json_grammar(schema: Mapping[str, Any] | bool, param: str) -> str:
    """Answers that are JSON of this schema. Raises `InvalidRequest` for a schema that cannot be followed."""
    what = "schema"
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise _refused(what, "it is nested too deeply", param) from None
    except (ValueError, TypeError) as error:
        raise _refused(what, f"it is no JSON: {error}", param) from None
    check_text(text, param)
    if wrong := too_many_multiples(schema):
        raise _refused(what, wrong, param)
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_pattern": _BLANKS, "json_allow_general_unicode_escapes": True}
        )
    except (ValueError, RecursionError) as error:
        raise _refused(what, _in_schema(schema, str(error)), param) from None
    return _checked(grammar, what, param, lambda message: _in_schema(schema, message))


def _in_schema(schema: Mapping[str, Any] | bool, message: str) -> str:
    place = place_in_schema(schema, message)
    return f"{place}: {reason(message)}" if place else reason(message)


def regex_grammar(regex: str, param: str) -> str:
    """Answers that match a regular expression from end to end (Rust's syntax). Raises `InvalidRequest`."""
    check_text(regex, param)
    return _checked(LLMatcher.grammar_from_regex(regex), "regular expression", param)


def choice_grammar(choices: Sequence[str], param: str) -> str:
    """Answers that are one of these texts. Raises `InvalidRequest`."""
    if not choices or not all(choices):
        raise InvalidRequest(f"{param}: a choice must have texts, none of them empty", param=param)
    return regex_grammar("|".join(map(re.escape, choices)), param)


def written_grammar(text: str, param: str) -> str:
    """Answers of a grammar in Lark's form, as llguidance has it, or in llama.cpp's (GBNF). Raises `InvalidRequest`."""
    if len(text) > LONGEST_WRITTEN_CHARACTERS:
        raise InvalidRequest(f"{param}: a grammar may have {LONGEST_WRITTEN_CHARACTERS} characters", param=param)
    check_text(text, param)
    if wrong := too_many_written(text):
        raise _refused("grammar", wrong, param)
    try:
        grammar = grammar_from("grammar", text)
    except ValueError as error:
        raise _refused("grammar", reason(str(error)), param) from None
    is_lark = "start:" in text
    return _checked(grammar, "grammar", param, lambda message: reason(message, written=is_lark))


def marked_grammar(answer: str, marked: str, marks: tuple[str, str], *, several: bool, param: str) -> str:
    """Answers of one grammar, or of another between `marks`, each on a line of its own, once or `several` times. Raises
    `InvalidRequest`."""
    opening, closing = (json.dumps(text) for text in (f"{marks[0]}\n", f"\n{marks[1]}"))
    rest = ' ("\\n" one)*' if several else ""
    either = f"start: @answer | one{rest}\none: {opening} @marked {closing}\n"
    parts = [{"lark_grammar": either}, _named(answer, "answer"), _named(marked, "marked")]
    return _checked(json.dumps({"grammars": parts}), "grammar", param)


def _named(grammar: str, name: str) -> dict[str, Any]:
    """A grammar of this module as a part of another."""
    part = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return {**part, "name": name}


def _checked(grammar: str, what: str, param: str, reason_of: Callable[[str], str] = reason) -> str:
    """`grammar`, if it is one that can be followed. Raises `InvalidRequest` with the reason."""
    if len(grammar) > LONGEST_CHARACTERS:
        raise InvalidRequest(f"{param}: a {what} may have about {LONGEST_CHARACTERS} characters", param=param)
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    if wrong:
        raise _refused(what, reason_of(messages[0]), param)
    return grammar


def _refused(what: str, why: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: this {what} cannot be followed: {why}", param=param)
