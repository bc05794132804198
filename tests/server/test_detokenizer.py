"""Property tests: whatever the ids, what is streamed is the text, and nothing of a stop string gets out."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bulletserve.server.detokenizer import Detokenizer
from bulletserve.server.stop_strings import StopStrings
from bulletserve.server.text_codec import TextCodec
from bulletserve.server.token_bytes import open_character
from bulletserve.server.token_log import TokenLog
from bulletserve.server.tokenizer import Tokenizer
from tests.server.small_model import small_tokenizer

BACKEND = small_tokenizer()
TOKENIZER = Tokenizer(BACKEND, {}, add_bos=None)
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)
LETTERS = st.text(alphabet="ab\u00e9\U0001f600", max_size=60)
STOPS = st.lists(st.text(alphabet="ab\u00e9\U0001f600", min_size=1, max_size=6), min_size=1, max_size=4)


def deltas(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    texts = []
    for token_id in ids:
        texts.append(detokenizer.push(token_id))
        if detokenizer.matched is not None:
            return texts
    return [*texts, detokenizer.finish()]


def first_to_complete(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, the slow way: the stop that is complete first, of two at the same place the longer."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(LETTERS, STOPS)
def test_a_stop_string_that_is_kept_is_the_end_of_the_text(text: str, stops: list[str]) -> None:
    ids = TOKENIZER.encode(text)
    before, stop = first_to_complete(text, stops)
    shown = "".join(deltas(Detokenizer(TOKENIZER.pieces, stop=stops, keep_stop=True), ids))
    assert shown == before + (stop or "")


@given(LETTERS, STOPS, st.integers(0, 70))
def test_the_first_tokens_are_not_searched_for_stop_strings(text: str, stops: list[str], least: int) -> None:
    ids = TOKENIZER.encode(text)
    detokenizer = Detokenizer(TOKENIZER.pieces, stop=stops, min_tokens=least)
    plain = Detokenizer(TOKENIZER.pieces)
    begin = "".join(plain.push(token) for token in ids[:least])
    rest = "".join(plain.push(token) for token in ids[least:])
    end, stop = first_to_complete(rest + plain.finish(), stops)
    assert "".join(deltas(detokenizer, ids)) == begin + end
    assert detokenizer.matched == stop


@settings(deadline=None)
@given(IDS, STOPS, st.booleans(), st.booleans())
def test_a_log_of_tokens_is_the_same_however_it_is_cut(
    ids: list[int], stops: list[str], keep: bool, skip: bool
) -> None:
    pieces = TOKENIZER.pieces if skip else TOKENIZER.all_pieces
    log = TokenLog(Detokenizer(pieces), pieces)
    detokenizer = Detokenizer(pieces, stop=stops, keep_stop=keep)
    told, text = [], ""
    for token in ids:
        log.push(token, None)
        shown = detokenizer.push(token)
        text += shown
        if detokenizer.matched is not None:
            told += log.take(shown, last=False)
            break
        if shown:
            told += log.take(shown, last=False)
    else:
        shown = detokenizer.finish()
        text += shown
        told += log.take(shown, last=detokenizer.matched is None)
    assert [one.token_id for one in told] == ids[: len(told)]
    assert [one.offset for one in told] == sorted(one.offset for one in told)
    for one in told:
        piece = pieces[one.token_id]
        if isinstance(piece, str):
            left = text[one.offset :]
            assert left.startswith(piece) or (detokenizer.matched is not None and piece.startswith(left))
    if detokenizer.matched is None:
        assert len(told) == len(ids)
    else:
        assert all(one.offset < len(text) for one in told)


@given(IDS, st.booleans())
def test_joined_deltas_are_the_decoding_of_all_ids(ids: list[int], skip: bool) -> None:
    pieces = TOKENIZER.pieces if skip else TOKENIZER.all_pieces
    expected = BACKEND.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas(Detokenizer(pieces), ids)) == expected


@given(st.text(max_size=30))
def test_text_comes_back_and_no_delta_has_a_replacement_character_that_the_text_has_not(text: str) -> None:
    """But for the added token "\u00e9!", which the tokenizers library, and we with it, read as the byte E9."""
    assume("\u00e9!" not in text)
    ids = TOKENIZER.encode(text)
    parts = deltas(Detokenizer(TOKENIZER.all_pieces), ids)
    assert "".join(parts) == text
    assert ("\ufffd" in "".join(parts)) == ("\ufffd" in text)


def test_an_added_token_of_letters_that_name_bytes_is_decoded_as_the_library_does() -> None:
    (token_id,) = TOKENIZER.encode("\u00e9!")
    assert "".join(deltas(Detokenizer(TOKENIZER.all_pieces), [token_id])) == BACKEND.decode([token_id]) == "\ufffd!"


def test_a_character_waits_for_its_last_byte_and_comes_with_it() -> None:
    ids = TOKENIZER.encode("\U0001f469")
    assert len(ids) == 4
    assert deltas(Detokenizer(TOKENIZER.pieces), ids) == ["", "", "", "\U0001f469", ""]


def test_a_cut_character_is_told_once_at_the_end() -> None:
    ids = TOKENIZER.encode("a\U0001f469")[:-1]
    assert deltas(Detokenizer(TOKENIZER.pieces), ids) == ["a", "", "", "", "\ufffd"]


def test_ids_beyond_the_vocabulary_add_nothing() -> None:
    assert deltas(Detokenizer(TOKENIZER.pieces), [TOKENIZER.vocab_size, 10**6]) == ["", "", ""]


@given(LETTERS, STOPS, st.data())
def test_stop_strings_do_not_depend_on_where_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    search = StopStrings(stops)
    shown = ""
    expected, matched = first_to_complete(text, stops)
    for start, end in itertools.pairwise([0, *cuts, len(text)]):
        shown += search.push(text[start:end])
        assert expected.startswith(shown)
    if search.matched is None:
        shown += search.rest()
    assert (shown, search.matched) == (expected, matched)


@given(LETTERS, STOPS)
def test_the_same_over_tokens(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(TOKENIZER.pieces, stop=stops)
    parts = deltas(detokenizer, TOKENIZER.encode(text))
    expected, matched = first_to_complete(text, stops)
    assert ("".join(parts), detokenizer.matched) == (expected, matched)


@given(LETTERS, STOPS)
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    search = StopStrings(stops)
    for character in text:
        search.push(character)
        if search.matched is not None:
            return
        held = search._held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_replacement_character_at_the_end_can_complete_a_stop() -> None:
    detokenizer = Detokenizer(TOKENIZER.pieces, stop=["a\ufffd"])
    ids = TOKENIZER.encode("ba\u00e9")[:-1]
    assert "".join(deltas(detokenizer, ids)) == "b"
    assert detokenizer.matched == "a\ufffd"


def test_after_a_match_nothing_follows() -> None:
    detokenizer = Detokenizer(TOKENIZER.pieces, stop=["lo w"])
    assert "".join(deltas(detokenizer, TOKENIZER.encode("hello world"))) == "hel"
    assert detokenizer.push(TOKENIZER.encode("x")[0]) == ""
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_begun_in_the_prompt_is_completed_and_nothing_else_of_the_prompt_shows(cut: int) -> None:
    ids = TOKENIZER.encode("hello \U0001f469 world")
    split = len(TOKENIZER.encode("hello ")) + cut
    tail = open_character(TOKENIZER.pieces, ids[:split])
    assert len(tail) == cut
    assert "".join(deltas(Detokenizer(TOKENIZER.pieces, tail=tail), ids[split:])) == "\U0001f469 world"


def test_a_character_begun_in_the_prompt_and_not_completed_leaves_no_trace() -> None:
    ids = TOKENIZER.encode("\U0001f469")[:2]
    tail = open_character(TOKENIZER.pieces, ids)
    assert "".join(deltas(Detokenizer(TOKENIZER.pieces, tail=tail), TOKENIZER.encode("hello"))) == "hello"
    assert deltas(Detokenizer(TOKENIZER.pieces, tail=tail), []) == [""]


@pytest.mark.parametrize("text", ["", "hello", "\u00e9", "\U0001f469", "\U0001f469a"])
def test_a_whole_character_at_the_end_of_a_prompt_is_not_open(text: str) -> None:
    assert open_character(TOKENIZER.pieces, TOKENIZER.encode(text)) == b""


@pytest.mark.model
@settings(max_examples=200)
@given(data=st.data())
def test_smollm2_ids(smollm2: TextCodec, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, smollm2.vocab_size - 1), max_size=40))
    assert "".join(deltas(smollm2.detokenizer([]), ids)) == smollm2.decode(ids)


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
        "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
        "P\u0159\u00edli\u0161 \u017elu\u0165ou\u010dk\u00fd k\u016f\u0148",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466!",
    ],
)
def test_smollm2_text(smollm2: TextCodec, text: str) -> None:
    parts = deltas(smollm2.detokenizer([]), smollm2.encode(text))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
