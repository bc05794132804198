"""Penalties on the GPU, in place, for any number of rows in one launch: the rules of `kernels/token_rules`.

Knows nothing about requests; rows name seats. A checkpoint that sets a penalty gives one to every request, so this is
the one kind of rules that a whole batch may have.
"""

import triton
import triton.language as tl
from torch import Tensor

from bulletserve.kernels.token_rules import IN_PROMPT

_BLOCK = 2048


@triton.jit
def _penalise(logits, rows, counts, penalties, vocabulary, in_prompt: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(rows + row).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    count = tl.load(counts + seat * vocabulary + token, token < vocabulary, 0)
    seen = count > 0
    place = logits + row * vocabulary + token
    value = tl.load(place, seen, 0.0)
    repetition = tl.load(penalties + 3 * seat)
    value = tl.where(value > 0, value / repetition, value * repetition)
    told = count & (in_prompt - 1)
    value -= tl.load(penalties + 3 * seat + 1) * told.to(tl.float32)
    value -= tl.where(told > 0, tl.load(penalties + 3 * seat + 2), 0.0)
    tl.store(place, value, seen)


def penalise(logits: Tensor, rows: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """Row r of `logits` float32 [R, V], contiguous, is changed in place as seat rows[r] (int32 [R]) asks.

    `counts` int32 [seats, V] and `penalties` float32 [seats, 3] are a `TokenHistory`'s.
    """
    count, vocabulary = logits.shape
    grid = (count, triton.cdiv(vocabulary, _BLOCK))
    _penalise[grid](logits, rows, counts, penalties, vocabulary, IN_PROMPT, _BLOCK, num_warps=4)
