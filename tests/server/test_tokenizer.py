from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bulletserve.core.errors import BrokenCheckpoint, UnsupportedModel
from bulletserve.formats.description import GgufTokenizer, JsonTokenizer, StoredTensor
from bulletserve.server.chat_template import ChatTemplate
from bulletserve.server.detokenizer import Detokenizer
from bulletserve.server.text_codec import TextCodec
from bulletserve.server.tokenizer import Tokenizer, build_tokenizer
from tests.server.small_model import MERGES, SPECIAL, small_checkpoint, small_tokenizer

TOKENS = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in MERGES))
SOURCE = GgufTokenizer(
    model="gpt2",
    pre="gpt-2",
    tokens=TOKENS,
    token_types=(3, 3, 4, *[1] * (len(TOKENS) - 3)),
    merges=tuple(" ".join(merge) for merge in MERGES),
    scores=(),
    bos_token_id=1,
    eos_token_id=0,
    unk_token_id=None,
    pad_token_id=None,
    add_bos=False,
    add_eos=False,
    add_space_prefix=False,
)


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text as it is cut into tokens."""
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]


def with_bos(folder: Path, **config: object) -> Tokenizer:
    """A tokenizer whose tokenizer.json puts <|open|> before each text."""
    backend = small_tokenizer()
    backend.post_processor = processors.TemplateProcessing("<|open|> $A", special_tokens=[("<|open|>", 1)])
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return build_tokenizer(JsonTokenizer(path, {"bos_token": "<|open|>", **config}))


def test_json_and_gguf_agree(tmp_path: Path) -> None:
    of_json = TextCodec.from_checkpoint(small_checkpoint(tmp_path)).tokenizer
    of_gguf = build_tokenizer(SOURCE)
    text = "hello wor<|close|>ld DEFGH \u00e9"
    assert of_gguf.encode(text) == of_json.encode(text)
    assert of_gguf.special_tokens == {"bos_token": "<|open|>", "eos_token": "<|end|>"}
    assert of_gguf.special_ids == {0, 1}  # a user-defined token (<|close|>) is no control token
    assert of_gguf.decode([0, *of_gguf.encode("hello"), 2]) == "hello<|close|>"
    assert of_gguf.vocab_size == len(TOKENS)


def test_merges_are_used() -> None:
    assert words(build_tokenizer(SOURCE), "hello world") == ["hello", " w", "or", "l", "d"]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a   1234", ["a", "  ", " 1234"]),
        ("smollm", "a   1234", ["a", "   ", "1", "2", "3", "4"]),
        ("llama-bpe", "a   1234\n\n b", ["a", "  ", " ", "123", "4", "\n\n", " b"]),
        ("qwen2", "a   1234", ["a", "  ", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "I'LL (go)", ["I", "'LL", " (", "go", ")"]),
    ],
)
def test_each_split_cuts_text_its_own_way(pre: str, text: str, expected: list[str]) -> None:
    tokenizer = build_tokenizer(replace(SOURCE, pre=pre))
    pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == expected


def test_qwen_texts_are_composed_first() -> None:
    tokenizer = build_tokenizer(replace(SOURCE, pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    assert tokenizer.longest_token == 4 * max(map(len, tokenizer.all_pieces))


@pytest.mark.parametrize(("field", "value"), [("model", "bert"), ("model", "llama"), ("pre", "tekken")])
def test_what_we_do_not_build_is_named(field: str, value: str) -> None:
    with pytest.raises(UnsupportedModel, match=value):
        build_tokenizer(replace(SOURCE, **{field: value}))


def test_a_broken_vocabulary_is_named() -> None:
    with pytest.raises(BrokenCheckpoint, match="vocabulary"):
        build_tokenizer(replace(SOURCE, merges=("no such",)))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BrokenCheckpoint, match=r"tokenizer\.json"):
        build_tokenizer(JsonTokenizer(tmp_path / "tokenizer.json", {}))


def test_a_decoder_that_is_no_table_is_refused(tmp_path: Path) -> None:
    backend = small_tokenizer()
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        build_tokenizer(JsonTokenizer(tmp_path / "tokenizer.json", {}))


def test_a_text_begins_with_exactly_one_bos(tmp_path: Path) -> None:
    tokenizer = with_bos(tmp_path)
    once = tokenizer.encode("hello hello hello hello")
    assert once[0] == 1
    assert once.count(1) == 1
    assert len(once) > 3  # the file's truncation and padding are of no concern here
    assert tokenizer.encode("<|open|>hello hello hello hello") == once
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != 1


def test_the_configuration_decides_about_bos(tmp_path: Path) -> None:
    assert with_bos(tmp_path, add_bos_token=False).encode("hello")[0] != 1
    assert build_tokenizer(replace(SOURCE, add_bos=True)).encode("hello")[0] == 1
    assert build_tokenizer(replace(SOURCE, add_bos=True)).encode("<|open|>hello").count(1) == 1


def test_sentence_piece_style_decoding(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581hi", "a"]
    backend = Backend(models.BPE(vocab={t: n for n, t in enumerate(tokens)}, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(JsonTokenizer(tmp_path / "tokenizer.json", {}))
    hi = tokens.index("\u2581hi")
    ids = [hi, *(3 + byte for byte in "\u65e5".encode()), tokens.index("a"), hi, 2]
    detokenizer = Detokenizer(tokenizer.pieces)
    texts = [detokenizer.push(token_id) for token_id in ids]
    assert texts == [" hi", "", "", "\u65e5", "a", " hi", ""]
    assert tokenizer.decode(ids) == "".join(texts).lstrip(" ")


def test_a_chat_whose_template_writes_bos_has_exactly_one(tmp_path: Path) -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<|open|>"})
    tokenizer = with_bos(tmp_path)
    codec = TextCodec(tokenizer, template, (0,))
    chat = codec.encode_chat([{"role": "user", "content": "hello"}])
    assert chat == [1, *tokenizer.encode("hello", add_special_tokens=False)] == codec.encode("hello")


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    bare = replace(small_checkpoint(tmp_path), tokenizer=None, weights=NoTensors())
    with pytest.raises(BrokenCheckpoint, match="no tokenizer"):
        TextCodec.from_checkpoint(bare)


class NoTensors:
    def tensors(self) -> Iterator[StoredTensor]:
        return iter(())


def test_random_weights_without_a_tokenizer_speak_bytes_and_numbers(tmp_path: Path) -> None:
    codec = TextCodec.from_checkpoint(replace(small_checkpoint(tmp_path), tokenizer=None))
    text = "Gr\u00fc\u00dfe \U0001f388"
    assert codec.decode(codec.encode(text)) == text
    assert len(codec.encode(text)) == len(text.encode())
    assert codec.decode([codec.encode("a")[0], 256, 299]) == "a<256><299>"
    assert codec.vocab_size == 300


@pytest.mark.model
def test_smollm2_keeps_blanks_before_a_digit_together(smollm2: TextCodec) -> None:
    assert smollm2.encode("x =   5") == [104, 446, 333, 37]
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_ids == {0, 2}


@pytest.mark.model
def test_smollm2_chat(smollm2: TextCodec) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = smollm2.encode_chat(messages)
    assert smollm2.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 3
