"""A model's tokens as the grammar library wants them.

Knows nothing about how a tokenizer works: the bytes of every token are all that a grammar needs.
"""

from collections.abc import Callable, Collection, Sequence

from llguidance import LLTokenizer, TokenizerWrapper


class _Tokens:
    """What `TokenizerWrapper` asks for."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special_ids: Collection[int], eos_id: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = eos_id
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def vocabulary(
    pieces: Sequence[str | bytes],
    special_ids: Collection[int],
    eos_ids: Collection[int],
    vocab_size: int,
    encode: Callable[[str], list[int]],
) -> LLTokenizer:
    """`pieces[id]`: what a token adds to a text, control tokens (`special_ids`) included; ids that logits have beyond
    them, up to `vocab_size`, are no tokens. A model without end tokens (`eos_ids`) gets one that it cannot draw."""
    tokens = [piece.encode() if isinstance(piece, str) else piece for piece in pieces[:vocab_size]]
    tokens += [b""] * (vocab_size - len(tokens))
    ends = sorted(token_id for token_id in eos_ids if token_id < vocab_size)
    if not ends:
        ends = [vocab_size]
        tokens.append(b"<end of text>")
    specials = {*(token_id for token_id in special_ids if token_id < vocab_size), *ends}
    wrapper = TokenizerWrapper(_Tokens(tokens, specials, ends[0], encode))
    return LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=ends)
