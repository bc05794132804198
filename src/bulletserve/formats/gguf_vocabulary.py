"""The vocabulary in a GGUF file's metadata, as data, and the tokens that end generation.

Knows nothing about tokenising: the server builds the tokenizer from what is returned here.
"""

from collections.abc import Mapping

from bulletserve.core.errors import BrokenCheckpoint
from bulletserve.formats.description import GgufTokenizer
from bulletserve.formats.fields import Fields

_NORMAL, _CONTROL = 1, 3  # GGUF's token types

# Tokens that end a turn or a document in the vocabularies of the families we run.
_END_TOKENS = frozenset(
    (
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
    )
)


def gguf_tokenizer(metadata: Mapping[str, object], where: str, vocab_size: int) -> GgufTokenizer | None:
    """The vocabulary, None if the file has none. `vocab_size` is the number of rows of the embeddings.

    Raises `BrokenCheckpoint` if the lists do not fit each other or the embeddings.
    """
    fields = Fields(metadata, where, "tokenizer.ggml.")
    model = fields.optional_text("model")
    if model is None or model == "no_vocab":
        return None
    tokens = fields.items("tokens", str)
    if not 0 < len(tokens) <= vocab_size:
        raise BrokenCheckpoint(f"{where}: {len(tokens)} tokens for {vocab_size} rows of embeddings")
    token_types = fields.items("token_type", int) or (_NORMAL,) * len(tokens)
    scores = fields.items("scores", float)
    if len(token_types) != len(tokens) or len(scores) not in (0, len(tokens)):
        raise BrokenCheckpoint(f"{where}: the lists of the vocabulary differ in length")
    return GgufTokenizer(
        model=model,
        pre=fields.optional_text("pre") or "default",
        tokens=tokens,
        token_types=token_types,
        merges=fields.items("merges", str),
        scores=scores,
        bos_token_id=_token_id(fields, "bos_token_id", len(tokens)),
        eos_token_id=_token_id(fields, "eos_token_id", len(tokens)),
        unk_token_id=_token_id(fields, "unknown_token_id", len(tokens)),
        pad_token_id=_token_id(fields, "padding_token_id", len(tokens)),
        # SentencePiece models begin with a token unless the file says otherwise, byte-level ones do not
        add_bos=fields.flag("add_bos_token", default=model == "llama"),
        add_eos=fields.flag("add_eos_token"),
        add_space_prefix=fields.flag("add_space_prefix", default=model == "llama"),
    )


def gguf_end_tokens(metadata: Mapping[str, object], where: str, tokenizer: GgufTokenizer) -> tuple[int, ...]:
    """The ids that end generation, the file's own end token first.

    A file names one end token, but a chat model has several: SmolLM2 ends a turn with <|im_end|> (named)
    and a document with <|endoftext|> (not named). So to the ids that the file names (end of sequence, turn,
    message), every known end token is added that the vocabulary marks as a control token, as llama.cpp
    does. The mark matters: a control token cannot be typed by a user, a normal token of the same text can.
    """
    fields = Fields(metadata, where, "tokenizer.ggml.")
    count = len(tokenizer.tokens)
    named = [
        tokenizer.eos_token_id,
        *(_token_id(fields, f"{kind}_token_id", count) for kind in ("eot", "eom")),
    ]
    marked = [
        id_
        for id_, (token, kind) in enumerate(zip(tokenizer.tokens, tokenizer.token_types, strict=True))
        if kind == _CONTROL and token in _END_TOKENS
    ]
    return tuple(dict.fromkeys(id_ for id_ in [*named, *marked] if id_ is not None))


def _token_id(fields: Fields, name: str, count: int) -> int | None:
    id_ = fields.optional_integer(name)
    if id_ is not None and not 0 <= id_ < count:
        raise fields.wrong(name, f"the id of one of {count} tokens")
    return id_
