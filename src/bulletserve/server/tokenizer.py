"""A checkpoint's tokenizer: text to ids, ids to text.

Knows nothing about requests or chats. Built with the `tokenizers` library from a `tokenizer.json`, or from the
vocabulary of a GGUF file, where the name of the split that comes before BPE decides how the text is cut: a wrong one
gives other ids for the same text, so an unknown name is an error.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from bulletserve.core.errors import BrokenCheckpoint, UnsupportedModel
from bulletserve.formats.description import GgufTokenizer, JsonTokenizer, TokenizerSource
from bulletserve.server.text_end import LETTERS_AND, NUMBERS, can_be_cut_for, ends
from bulletserve.server.token_bytes import Piece, token_pieces

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types

_MOST_COMPOSED = 4
"""Characters that NFC makes one of, at most."""


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is cut before BPE. `pattern` None: GPT-2's, which the library has built in."""

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False


_GPT2 = _Split()
_LLAMA3 = _Split(LETTERS_AND % NUMBERS[0], ignore_merges=True)
_QWEN2 = _Split(LETTERS_AND % NUMBERS[1], nfc=True)
_SPLITS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _Split(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


class Tokenizer:
    """Text to ids and back. Safe to use from several threads.

    `special_tokens` are the named ones that chat templates use (`bos_token`, `eos_token`, ...). `pieces[id]` is what
    the token adds to a text, empty for control tokens; `all_pieces[id]` shows those too. `special_texts`
    are the control tokens as one would write them. `longest_token`: characters of a text that become one token at most,
    None where there is no such number.
    """

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str], *, add_bos: bool | None) -> None:
        self._backend = backend
        self._add_bos = add_bos
        bos = special_tokens.get("bos_token")
        self._bos_id = None if bos is None else backend.token_to_id(bos)
        self.special_tokens = dict(special_tokens)
        tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
        steps = [] if backend.decoder is None else _steps(json.loads(backend.decoder.__getstate__()))
        self.all_pieces: list[Piece] = token_pieces(tokens, steps)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts = tuple(token.content for token in added.values() if token.special)
        self.pieces: list[Piece] = list(self.all_pieces)
        for token_id in self.special_ids:
            self.pieces[token_id] = ""
        self.longest_token = _longest_token(backend, self.all_pieces)
        self._can_be_cut_for = can_be_cut_for(backend)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return len(self.all_pieces)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens written out in it count as such.

        With `add_special_tokens` a tokenizer that begins texts with a BOS token gives exactly one, also where the
        text brings its own. Works without the GIL, in about 0.25 s per million characters.
        """
        add_special_tokens = add_special_tokens and self._add_bos is not False
        # the library's `encode` holds the GIL, its batch methods do not
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self._bos_id is not None:
            if self._add_bos and ids[:1] != [self._bos_id]:
                ids.insert(0, self._bos_id)
            if ids[:2] == [self._bos_id, self._bos_id]:
                del ids[0]
        return ids

    def encode_end(self, text: str, tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, perhaps without some of the first: at least the last `tokens` are there.

        Takes the time of that end where a text may be cut for this tokenizer, else that of the whole.
        """
        in_front = self._backend.num_special_tokens_to_add(False) + 1
        for end in ends(text, tokens) if self._can_be_cut_for else ():
            ids = self.encode(end, add_special_tokens=add_special_tokens)
            if len(ids) >= tokens + in_front or len(end) == len(text):
                return ids
        return self.encode(text, add_special_tokens=add_special_tokens)

    def encode_as_text(self, text: str) -> list[int]:
        """The ids of `text` where special tokens written out in it are characters like any other."""
        ids: list[int] = self._text_backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    @cached_property
    def _text_backend(self) -> Backend:
        backend = Backend.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence of ids."""
        # as with `encode`: only the batch method works without the GIL
        return str(self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0])


def _longest_token(backend: Backend, pieces: Sequence[Piece]) -> int | None:
    longest = max(map(len, pieces), default=1)
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # it takes in any number of blanks
    if backend.normalizer is None:
        return longest
    is_nfc = json.loads(backend.normalizer.__getstate__())["type"] == "NFC"
    return longest * _MOST_COMPOSED if is_nfc else None


def build_tokenizer(source: TokenizerSource) -> Tokenizer:
    """The tokenizer that `source` describes.

    Raises `BrokenCheckpoint` if it is damaged, `UnsupportedModel` (naming what) if it is of a kind we do not build.
    """
    return _from_json(source) if isinstance(source, JsonTokenizer) else _from_gguf(source)


def _from_json(source: JsonTokenizer) -> Tokenizer:
    try:
        backend = Backend.from_file(str(source.path))
    except Exception as error:  # the library raises bare exceptions
        raise BrokenCheckpoint(f"{source.path}: no tokenizer that the tokenizers library can read ({error})") from None
    backend.no_truncation()  # some files carry settings of their training run
    backend.no_padding()
    named = {name: _token_text(value) for name, value in source.config.items() if name.endswith("_token")}
    add_bos = source.config.get("add_bos_token")
    return Tokenizer(
        backend,
        {name: text for name, text in named.items() if text is not None},
        add_bos=add_bos if isinstance(add_bos, bool) else None,
    )


def _token_text(value: object) -> str | None:
    """A token of `tokenizer_config.json`: a string, or an object with its `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _from_gguf(source: GgufTokenizer) -> Tokenizer:
    if source.model != "gpt2":
        raise UnsupportedModel(
            f"the GGUF file's tokenizer is of the kind {source.model!r} (tokenizer.ggml.model); of GGUF files those of "
            "the kind 'gpt2' are served. A folder with the same model and its tokenizer.json may work."
        )
    split = _SPLITS.get(source.pre)
    if split is None:
        raise UnsupportedModel(
            f"the GGUF file's tokenizer cuts text by {source.pre!r} (tokenizer.ggml.pre); "
            f"known are {', '.join(_SPLITS)}"
        )
    try:
        backend = _byte_level_bpe(source, split)
    except Exception as error:  # the library raises bare exceptions
        raise BrokenCheckpoint(f"the GGUF file's vocabulary makes no tokenizer ({error})") from None
    named = {
        "bos_token": source.bos_token_id,
        "eos_token": source.eos_token_id,
        "unk_token": source.unk_token_id,
        "pad_token": source.pad_token_id,
    }
    special = {name: source.tokens[token_id] for name, token_id in named.items() if token_id is not None}
    return Tokenizer(backend, special, add_bos=source.add_bos)


def _byte_level_bpe(source: GgufTokenizer, split: _Split) -> Backend:
    vocabulary = {token: token_id for token_id, token in enumerate(source.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in source.merges)]
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.ignore_merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=source.add_space_prefix, use_regex=split.pattern is None)
    first: list[pre_tokenizers.PreTokenizer] = []
    if split.digits:
        first.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        first.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    backend.decoder = decoders.ByteLevel()
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        backend.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, its_kind in zip(source.tokens, source.token_types, strict=True)
                if its_kind == kind
            ]
        )
    return backend


def _steps(decoder: Mapping[str, object]) -> list[str]:
    """The names of a decoder's steps, from its JSON."""
    inner = decoder.get("decoders")
    if isinstance(inner, list):
        return [name for step in inner for name in _steps(step)]
    return [str(decoder.get("type"))]
