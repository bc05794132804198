"""A tokenizer for random weights that come without one, so that a shape alone can be served and measured.

Knows nothing about any model's text. Ids below 256 are the bytes of UTF-8, every other id reads as its number in
angle brackets: answers of random weights are noise either way, but each token adds text, as a stream expects.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bulletserve.core.errors import UnsupportedModel

_BYTES = 256


def byte_backend(vocab_size: int) -> Tokenizer:
    """The backend for `vocab_size` ids. Raises `UnsupportedModel` where bytes do not fit."""
    if vocab_size < _BYTES:
        raise UnsupportedModel(f"a vocabulary of {vocab_size} tokens cannot be served without its tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = alphabet + [f"<{token_id}>" for token_id in range(_BYTES, vocab_size)]
    backend = Tokenizer(models.BPE(vocab={name: token_id for token_id, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend
