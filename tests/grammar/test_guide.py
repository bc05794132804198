"""Masks are what the grammar allows, token by token, to the end; checked with whole texts and with random walks."""

import json
import random
import re
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.errors import BrokenCheckpoint, InvalidRequest
from bulletserve.core.events import Event, Masked
from bulletserve.grammar.guide import GrammarGuide
from bulletserve.grammar.texts import (
    ANY_OBJECT,
    choice_grammar,
    json_grammar,
    marked_grammar,
    regex_grammar,
    written_grammar,
)
from bulletserve.grammar.vocabulary import vocabulary
from bulletserve.server.text_codec import TextCodec
from tests.server.small_model import SHAPE, small_checkpoint

EOS = 0
VOCAB_SIZE = SHAPE.vocab_size  # some ids more than the tokenizer has
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Answers:
    def __init__(self) -> None:
        self.queue: SimpleQueue[Event] = SimpleQueue()

    def post(self, event: Event) -> None:
        self.queue.put(event)

    def next(self) -> Masked:
        event = self.queue.get(timeout=20)
        assert isinstance(event, Masked)
        return event


class Walk:
    """One guide, and answers of its requests."""

    def __init__(self, codec: TextCodec, eos_ids: tuple[int, ...] = (EOS,)) -> None:
        tokenizer = codec.tokenizer
        self.codec = codec
        self.answers = Answers()
        self.guide = GrammarGuide(
            self.answers,
            lambda: vocabulary(tokenizer.all_pieces, tokenizer.special_ids, eos_ids, VOCAB_SIZE, self.encode),
        )

    def encode(self, text: str) -> list[int]:
        return self.codec.encode(text, add_special_tokens=False)

    def random_answer(self, grammar: str, seed: int, most: int = 400) -> str | None:
        """What a model that knows nothing answers, None if it does not come to an end."""
        chance = random.Random(seed)
        ids: list[int] = []
        self.guide.begin(seed, grammar)
        while len(ids) < most:
            made = self.answers.next()
            assert not made.error
            if made.over:
                break
            token = chance.choice(allowed(made))
            if token == EOS:
                break
            ids.append(token)
            self.guide.follow(seed, token)
        else:
            assert not self.answers.next().error
            self.guide.forget(seed)
            return None
        self.guide.forget(seed)
        return self.codec.decode(ids)

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether the grammar lets exactly this text be the answer."""
        self.guide.begin(1, grammar)
        try:
            for token in self.encode(text):
                made = self.answers.next()
                if made.over or token not in allowed(made):
                    return False
                self.guide.follow(1, token)
            made = self.answers.next()
            return made.over or EOS in allowed(made)
        finally:
            self.guide.forget(1)


def allowed(made: Masked) -> list[int]:
    bits = int.from_bytes(made.mask, "little")
    return [token for token in range(VOCAB_SIZE) if bits >> token & 1]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    walk = Walk(TextCodec.from_checkpoint(small_checkpoint(tmp_path_factory.mktemp("small"))))
    yield walk
    walk.guide.close()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_drawn_from_the_masks_fits_the_schema(walk: Walk, seed: int) -> None:
    text = walk.random_answer(json_grammar(PERSON, "response_format"), seed)
    assert text is not None
    person = json.loads(text)
    assert person.keys() == {"name", "age"}
    assert len(person["name"]) <= 8
    assert 0 <= person["age"] <= 150


@pytest.mark.parametrize("seed", range(5))
def test_and_a_regular_expression(walk: Walk, seed: int) -> None:
    regex = r"[a-f]{3}/[0-9]+(yes|no) \d{2}"
    text = walk.random_answer(regex_grammar(regex, "structured_outputs"), seed)
    assert text is None or re.fullmatch(regex, text)


@given(
    choices=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6), min_size=1, max_size=4
    ),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_and_any_list_of_choices(walk: Walk, choices: list[str], seed: int) -> None:
    assert walk.random_answer(choice_grammar(choices, "structured_outputs"), seed) in choices


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"name": "Ada", "age": 36}', True),
        ('{"name":"Ada","age":36}', True),
        ('{\n  "name": "Ada",\n  "age": 36\n}', True),
        ('{"name": "Ada"}', False),
        ('{"name": "Ada", "age": "36"}', False),
        ('{"name": "Ada", "age": 36}}', False),
        ('{"name": "Ada", "age": 36', False),
        ("{" + " " * 40 + '"name": "Ada", "age": 36}', False),
        ('<|end|>{"name": "Ada", "age": 36}', False),
    ],
)
def test_whole_texts(walk: Walk, text: str, fits: bool) -> None:
    assert walk.accepts(json_grammar(PERSON, "response_format"), text) is fits


texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=5)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts, lambda inner: st.lists(inner, max_size=3), max_leaves=5
)


@given(value=st.dictionaries(texts, values, max_size=3))
@settings(max_examples=60, deadline=None)
def test_any_object_is_an_object_and_nothing_else_is(walk: Walk, value: dict[str, object]) -> None:
    grammar = json_grammar(ANY_OBJECT, "response_format")
    assert walk.accepts(grammar, json.dumps(value, ensure_ascii=False))
    assert not walk.accepts(grammar, json.dumps([value]))


CALLED = '<t>\n{"x": 1}\n</t>'


@pytest.mark.parametrize(
    "answer",
    [
        json_grammar(PERSON, "x"),
        regex_grammar("[a-z{][a-z]+", "x"),
        choice_grammar(["yes", "no"], "x"),
        written_grammar('start: "(" inner ")"\ninner: "a"', "x"),
        written_grammar('root ::= "(" inner ")"\ninner ::= "a"', "x"),
    ],
)
@pytest.mark.parametrize("several", [True, False])
def test_an_answer_or_what_stands_between_marks(walk: Walk, answer: str, several: bool) -> None:
    one = {"properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False}
    marked = json_grammar({"type": "object", **one}, "x")
    grammar = marked_grammar(answer, marked, ("<t>", "</t>"), several=several, param="x")
    for text in ('{"name": "a", "age": 3}', "yes", "(a)", "{ab", "", '{"x": 1}', "(b)"):
        assert walk.accepts(grammar, text) is walk.accepts(answer, text), text
    assert walk.accepts(grammar, CALLED)
    assert walk.accepts(grammar, f"{CALLED}\n{CALLED}") is several
    for text in (CALLED[:-1], f"{CALLED}\n", f"yes{CALLED}", f"{CALLED}yes", CALLED.replace("1", "2")):
        assert not walk.accepts(grammar, text), text


@pytest.mark.parametrize(
    ("regex", "text", "fits"),
    [
        (r"^\d{3}$", "123", True),
        (r"^\d{3}$", "1234", False),
        (r"\w+/x\/y", "ab/x/y", True),
        (r"(?i)yes", "YeS", True),
        (r"[^a]+", "bcd\n", True),
        (r"[^a]+", "bad", False),
    ],
)
def test_regular_expressions_match_the_whole_answer(walk: Walk, regex: str, text: str, fits: bool) -> None:
    assert walk.accepts(regex_grammar(regex, "guided_regex"), text) is fits


def test_a_model_without_end_tokens_ends_where_nothing_may_follow(walk: Walk) -> None:
    endless = Walk(walk.codec, eos_ids=())
    grammar = choice_grammar(["hello", "hell"], "structured_outputs")
    assert endless.random_answer(grammar, 3) in ("hello", None)
    endless.guide.close()


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: json_grammar({"type": "number or so"}, "response_format"), "response_format: this schema"),
        (lambda: json_grammar({"not": {"type": "string"}}, "response_format"), "#/not: these keywords"),
        (lambda: json_grammar({"items": {"type": "date"}}, "p"), 'followed: #/items/type: there is no type "date"'),
        (lambda: json_grammar({"properties": {"not": {"not": {}}}}, "p"), "#/properties/not/not: these keywords"),
        (lambda: json_grammar({"enum": [{"format": "x"}], "anyOf": [{"format": "x"}]}, "p"), "p: this schema"),
        (lambda: json_grammar({"type": "string", "format": "x"}, "p"), '#/format: the format "x" is not supported'),
        (lambda: json_grammar({"enum": []}, "p"), "no value fits it: there is nothing to choose from"),
        (lambda: json_grammar({"$ref": "#/$defs/x"}, "p"), re.escape("$ref: there is no /$defs/x in it")),
        (lambda: json_grammar({"$ref": "http://x/y"}, "p"), "http://x/y is not part of it, and nothing is fetched"),
        (lambda: json_grammar({"a": {1, 2}}, "p"), "it is no JSON: Object of type set"),  # type: ignore[dict-item]
        (lambda: json_grammar(nested(100_000), "p"), "nested too deeply"),
        (lambda: regex_grammar("(", "guided_regex"), "guided_regex: this regular expression"),
        (lambda: regex_grammar("a(b", "p"), "followed: at character 2: unclosed group$"),
        (lambda: regex_grammar("a\n(b", "p"), "followed: unclosed group$"),
        (lambda: regex_grammar("a/(b", "p"), "followed: unclosed group$"),
        (lambda: regex_grammar("(a)\\1", "p"), "at character 4: backreferences are not supported$"),
        (lambda: written_grammar('start: "a"\nfoo: "b" ]', "p"), "line 2, column 10: expecting rule"),
        (lambda: written_grammar('start: "a" foo', "p"), "line 1, column 8: there is no rule foo$"),
        (lambda: written_grammar("start: a\na: /x(/", "p"), "line 2, column 4: at character 2: unclosed group$"),
        (lambda: written_grammar('start: "a', "p"), "column 10: what begins here is no part of a grammar$"),
        (lambda: written_grammar("root ::= foo", "p"), "followed: there is no rule foo$"),
        (lambda: written_grammar('root ::= ( "a" ', "p"), "followed: line 1: Expected '\\)'$"),
        (lambda: choice_grammar(["a\ud800"], "p"), "half of a surrogate pair .at character 1."),
        (lambda: choice_grammar([], "guided_choice"), "guided_choice: a choice must have texts"),
        (lambda: choice_grammar(["a", ""], "guided_choice"), "none of them empty"),
        (lambda: regex_grammar("a" * 300_000, "guided_regex"), "200000 characters"),
    ],
)
def test_what_cannot_be_followed_is_said_at_once(make, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        make()


def test_whoever_asks_is_answered_whatever_goes_wrong(walk: Walk) -> None:
    walk.guide.begin(5, "no grammar {")
    assert "cannot be followed" in walk.answers.next().error
    walk.guide.forget(5)
    walk.guide.begin(6, choice_grammar(["yes"], "p"))
    assert walk.answers.next().mask
    walk.guide.follow(6, walk.encode("z")[0])
    made = walk.answers.next()
    assert made.ours and "a fault of this engine" in made.error
    walk.guide.forget(6)
    walk.guide.begin(7, regex_grammar("", "p"))
    assert allowed(walk.answers.next()) == [EOS]
    walk.guide.forget(7)


def test_without_a_tokenizer_every_grammar_is_an_error() -> None:
    def none() -> None:
        raise BrokenCheckpoint("the model has no tokenizer.json")

    answers = Answers()
    guide = GrammarGuide(answers, none)  # type: ignore[arg-type]
    for request_id in range(2):
        guide.begin(request_id, choice_grammar(["yes"], "p"))
        assert "no tokenizer.json" in answers.next().error
    guide.close()


def test_a_request_that_is_forgotten_while_its_grammar_compiles_leaves_nothing(walk: Walk) -> None:
    begun, gate, answers = threading.Event(), threading.Event(), Answers()
    ready = walk.guide.make_vocabulary

    def slowly():
        begun.set()
        gate.wait(20)
        return ready()

    guide = GrammarGuide(answers, slowly)
    guide.begin(1, choice_grammar(["yes"], "p"))
    assert begun.wait(20)
    guide.forget(1)
    gate.set()
    answers.next()
    assert not guide._followed
    guide.close()


def test_a_light_grammar_and_masks_do_not_wait_for_heavy_grammars(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, answers, begin = threading.Event(), Answers(), GrammarGuide._begin
    heavy = choice_grammar(["a" * 9000], "p")

    def held(guide: GrammarGuide, request_id: int, followed: object, grammar: str) -> Masked:
        assert grammar != heavy or gate.wait(20)
        return begin(guide, request_id, followed, grammar)  # type: ignore[arg-type]

    monkeypatch.setattr(GrammarGuide, "_begin", held)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    guide = GrammarGuide(answers, walk.guide.make_vocabulary)
    for request_id in (1, 2, 3):
        guide.begin(request_id, heavy)
    guide.begin(4, choice_grammar(["yes"], "p"))
    assert answers.next().request_id == 4
    guide.follow(4, walk.encode("y")[0])
    assert answers.next().request_id == 4
    gate.set()
    assert [answers.next().request_id for _ in range(3)] == [1, 2, 3]
    guide.close()


def test_nobody_waits_for_the_grammars_of_those_who_have_gone(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, begun, gate, answers = [], threading.Event(), threading.Event(), Answers()
    ready, begin = walk.guide.make_vocabulary, GrammarGuide._begin

    def slowly():
        begun.set()
        gate.wait(20)
        return ready()

    def told(guide: GrammarGuide, request_id: int, *rest: object) -> Masked:
        compiled.append(request_id)
        return begin(guide, request_id, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(GrammarGuide, "_begin", told)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    guide = GrammarGuide(answers, slowly)
    for request_id in (1, 2, 3):
        guide.begin(request_id, choice_grammar(["yes"], "p"))
    assert begun.wait(20)
    guide.forget(2)
    guide.begin(4, choice_grammar(["no"], "p"))
    gate.set()
    assert [answers.next().request_id for _ in range(3)] == compiled == [1, 3, 4]
    guide.close()
