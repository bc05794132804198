"""The ids of a text's end are those that the whole text has there, and are made without the whole text."""

import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.formats.description import JsonTokenizer
from bulletserve.server import text_end
from bulletserve.server.text_end import can_be_cut_for
from bulletserve.server.tokenizer import Tokenizer, build_tokenizer
from tests.server.small_model import small_tokenizer
from tests.server.test_tokenizer import SOURCE

KINDS = ("gpt-2", "smollm", "llama-bpe", "qwen2")
PIECES = (
    *("hello", "hell", " w", "or", "'s", "'LL", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\x1c", "\u180e"),
    *("1", "1234", "\u00b2", "e\u0301", "\u0301", " \u0308", "\u65e5\u672c", "\u1112\u1161\u11ab", "(", ").", "_", "/"),
    *("<|end|>", "<|open|>", "<|close|>", "\U0001f600", "\u200b", "\u0e01\u0e33", "\u0915\u094d\u0937"),
)


def tokenizer_of(kind: str, **options: object) -> Tokenizer:
    return build_tokenizer(replace(SOURCE, pre=kind, **options))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), tokens=st.integers(1, 12), special=st.booleans())
@settings(deadline=None, max_examples=150)
def test_the_last_ids_are_those_of_the_whole_text(kind: str, data: st.DataObject, tokens: int, special: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=60)))
    whole = tokenizer.encode(text, add_special_tokens=special)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_end, "_AT_LEAST_CHARACTERS", data.draw(st.integers(0, 9)))
        patch.setattr(text_end, "_CHARACTERS_PER_TOKEN", 1)
        end = tokenizer.encode_end(text, tokens, add_special_tokens=special)
    assert end[-tokens:] == whole[-tokens:]
    assert len(end) >= min(tokens, len(whole))


TOKENIZERS = {kind: tokenizer_of(kind, add_bos=kind == "llama-bpe") for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_wherever_a_cut_may_be_the_text_behind_it_is_cut_up_as_in_the_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    text = "".join(one + other + " " for one in PIECES for other in PIECES)
    whole = tokenizer.encode(text)
    cuts = [cut.end() for cut in text_end._CUT.finditer(text)]
    assert len(cuts) > 300
    for cut in cuts[:: max(1, len(cuts) // 60)]:
        behind = tokenizer.encode(text[cut:], add_special_tokens=False)
        assert whole[-len(behind) :] == behind


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_is_not_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **how: read.append(len(text)) or encode(self, text, **how)
    )
    text = "hello world, it's 3 o'clock\n" * 100_000
    assert len(TOKENIZERS[kind].encode_end(text, 50)) >= 50
    assert sum(read) < 2000
    read.clear()
    assert len(TOKENIZERS[kind].encode_end("a" * 100_000, 50)) >= 50, "no place to cut"
    assert read == [100_000]


def test_the_packaged_model_may_be_cut_for() -> None:
    tokenizer = build_tokenizer(open_checkpoint(None, "auto").tokenizer)  # type: ignore[arg-type]
    assert can_be_cut_for(tokenizer._backend)
    text = Path(text_end.__file__).read_text() * 30
    assert tokenizer.encode_end(text, 700)[-700:] == tokenizer.encode(text)[-700:]
    assert len(tokenizer.encode_end(text, 700)) < 3000


def plain(change) -> Tokenizer:
    backend = small_tokenizer()
    backend = type(backend).from_str(backend.to_str().replace("\u65e5 \u672c", "\u65e5\u672c"))
    change(backend)
    return backend


UNSAFE = {
    "blanks in an added token": lambda b: b.add_tokens([AddedToken("a b", normalized=False)]),
    "an added token that takes in blanks": lambda b: b.add_tokens([AddedToken("[x]", rstrip=True)]),
    "one that looks at its neighbours": lambda b: b.add_tokens([AddedToken(" w", single_word=True)]),
    "another normaliser": lambda b: setattr(b, "normalizer", normalizers.NFKC()),
    "a blank in front": lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "no split": lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.ByteLevel(False, use_regex=False)),
    "another split": lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Split(" [a-z]+", "isolated")),
    "metaspace": lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Metaspace()),
}


@pytest.mark.parametrize("why", UNSAFE)
def test_what_is_not_known_is_not_cut_for(why: str) -> None:
    assert can_be_cut_for(plain(lambda _: None))
    assert not can_be_cut_for(plain(UNSAFE[why]))


def test_special_tokens_in_front_are_none_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def template(backend) -> None:
        backend.post_processor = processors.TemplateProcessing(
            single="<|open|> <|open|> $A <|end|>", special_tokens=[("<|open|>", 1), ("<|end|>", 0)]
        )

    backend = plain(template)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(JsonTokenizer(tmp_path / "tokenizer.json", {"bos_token": "<|close|>"}))
    text = "hello hello world " * 20
    whole = tokenizer.encode(text)
    monkeypatch.setattr(text_end, "_CHARACTERS_PER_TOKEN", 1)
    for more in range(40):
        monkeypatch.setattr(text_end, "_AT_LEAST_CHARACTERS", more)
        for tokens in range(1, 40):
            assert tokenizer.encode_end(text, tokens)[-tokens:] == whole[-tokens:]


def test_no_text_shrinks_to_less_than_a_quarter_by_composition() -> None:
    longest = max(len(unicodedata.normalize("NFD", chr(point))) for point in range(0x110000))
    assert longest == 4
