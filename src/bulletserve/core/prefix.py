"""Names for blocks of tokens, so that equal prefixes find each other.

Knows nothing about which block of memory holds them. A block's hash covers its own tokens, all tokens before it
and the request's salt, so two requests share a block only where everything that led to it is equal.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16

_UNNAMED = blake2b(digest_size=HASH_BYTES)  # copying it costs less than making another


def root_hash(salt: str) -> bytes:
    """The hash before the first block."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, person=b"bullet-root").digest()


def next_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block that follows the one named `parent`; an array of `tokens` holds 64-bit numbers."""
    name = _UNNAMED.copy()
    numbers = tokens if isinstance(tokens, array) else array("q", tokens)
    name.update(parent + numbers.tobytes())
    return name.digest()


def block_hashes(tokens: Sequence[int], block_size: int, salt: str = "") -> tuple[bytes, ...]:
    """The hashes of all full blocks of a token sequence."""
    hashes: list[bytes] = []
    parent = root_hash(salt)
    tokens = array("q", tokens)
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = next_hash(parent, tokens[end - block_size : end])
        hashes.append(parent)
    return tuple(hashes)
