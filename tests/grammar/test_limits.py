"""Every limit of the grammar library, reached: whoever wrote the grammar is told in our words what to do."""

import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from bulletserve.core.errors import InvalidRequest
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.grammar import guide
from bulletserve.grammar.reasons import reason
from bulletserve.grammar.texts import json_grammar, limits, regex_grammar
from bulletserve.grammar.vocabulary import vocabulary
from bulletserve.server.text_codec import TextCodec
from tests.grammar.test_guide import Answers, Walk, walk

__all__ = ["walk"]
SCHEMA = json_grammar({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(40)}}, "schema")
LIMITS: dict[str, tuple[Any, str]] = {
    "max_items_in_row": (2, "it allows too many different texts at once"),
    "initial_lexer_fuel": (1, "it allows too many different texts at once"),
    "step_lexer_fuel": (50, "it allows too many different texts at once"),
    "step_max_items": (3, "it allows too many different texts at once"),
    "max_lexer_states": (3, "it allows too many different texts at once"),
    "max_grammar_size": (10, "it is too large"),
}


def test_each_limit_of_the_library_is_among_them() -> None:
    fields = set(re.findall(r"(\w+): ", repr(limits())))
    assert fields - {"precompute_large_lexemes", "verbose_errors"} == LIMITS.keys()


@pytest.mark.parametrize("name", LIMITS)
def test_what_to_do_is_said_in_our_words(name: str, walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    value, words = LIMITS[name]
    low = LLParserLimits(verbose_errors=False, **{name: value})
    wrong, messages = LLMatcher.validate_grammar_with_warnings(SCHEMA, limits=low)
    if wrong:
        said = reason(messages[0])
    else:
        monkeypatch.setattr(guide, "limits", lambda: low)
        walk.guide.begin(1, SCHEMA)
        made = walk.answers.next()
        for token in walk.encode('{"p1": "x"'):
            if not made.error:
                walk.guide.follow(1, token)
                made = walk.answers.next()
        assert not made.ours
        said = made.error
    assert words in said and "use fewer" in said and "repetitions" in said
    assert not re.search(r"lexer|limit|expressions|states|verbose|\d{3}", said)


@pytest.mark.model
def test_repetitions_inside_repetitions() -> None:
    """At the first mask, with a vocabulary as models have it: the grammar by itself is compiled without a complaint."""
    checkpoint, answers = open_checkpoint(None), Answers()
    codec = TextCodec.from_checkpoint(checkpoint)
    of_model = vocabulary(
        codec.tokenizer.all_pieces, codec.tokenizer.special_ids, (0,), checkpoint.shape.vocab_size, codec.encode
    )
    following = guide.GrammarGuide(answers, lambda: of_model)
    following.begin(1, regex_grammar("(.{1,30}){1,30}", "regex"))
    made = answers.next()
    following.close()
    assert made.error.startswith("the answer's format cannot be followed: it allows too many different texts at once: ")
    assert "use fewer or smaller repetitions" in made.error and not made.ours


def test_patterns_that_must_all_hold() -> None:
    schema = {"allOf": [{"type": "string", "pattern": f".*{letter}.{{5}}.*"} for letter in "abcdefghij"]}
    with pytest.raises(InvalidRequest, match="cannot be followed: it allows too many different texts at once"):
        json_grammar(schema, "schema")
