"""Choosing the next token: greedy, temperature, top-k, top-p, with randomness that can be replayed.

Knows nothing about requests. Randomness is counter-based: row r draws one uniform from (seed, position) by
integer hashing and inverts its own cumulative distribution, so its token depends on its logits, seed and
position alone, never on the rows beside it. Logits of -inf are never chosen.

Order of the filters as in vLLM: temperature, top-k (ties with the k-th stay), then top-p over what is left: the
smallest set of the most likely tokens whose mass reaches p (among equals at its border the lower ids stay).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_NARROW = 512  # most top-p sets are smaller, so that few rows need their whole vocabulary sorted


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of R rows is sampled, one tensor [R] per field.

    `temperature` float32 (0: greedy), `top_p` float32 in (0, 1] (1: off), `top_k` int64 (0: off), `seed` int64 (any
    value), `position` int64: the index of the sampled token in its sequence.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor
    position: Tensor

    def select(self, rows: Tensor) -> "SamplingRows":
        """The rows at the indices `rows` int64 [S]."""
        return SamplingRows(
            self.temperature[rows], self.top_p[rows], self.top_k[rows], self.seed[rows], self.position[rows]
        )


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """One token id per row of `logits` float32 [R, V] -> int64 [R]. Changes no argument."""
    drawn = rows.temperature.nonzero().squeeze(1)
    if drawn.numel() == logits.shape[0]:
        return _draw(logits, rows)
    chosen = logits.argmax(dim=-1)
    if drawn.numel() == 0:
        return chosen
    return chosen.index_copy_(0, drawn, _draw(logits[drawn], rows.select(drawn)))


def uniforms(seed: Tensor, position: Tensor) -> Tensor:
    """One number in [0, 1) per row, float64 with 53 random bits, from int64 `seed` and `position` [R]."""
    bits = _mix(seed + _signed(0x9E3779B97F4A7C15))
    bits = _mix(bits + position * _signed(0xD1B54A32D192ED03) + _signed(0x8CB92BA72F3D8DD7))
    return ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014) in wrapping int64, shifts made logical."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    # The greatest logit becomes 0 first: a tiny temperature must not overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / rows.temperature.unsqueeze(1)
    _keep_top_k(scaled, rows.top_k)
    probabilities = torch.softmax(scaled, dim=-1)
    _keep_top_p(probabilities, rows.top_p)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = uniforms(rows.seed, rows.position).unsqueeze(1) * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _keep_top_k(scaled: Tensor, top_k: Tensor) -> None:
    """Sets logits below the row's k-th greatest to -inf, in place."""
    vocabulary = scaled.shape[1]
    limited = ((top_k > 0) & (top_k < vocabulary)).nonzero().squeeze(1)
    if limited.numel() == 0:
        return
    k = top_k[limited]
    part = scaled[limited]
    best = part.topk(int(k.max()), dim=-1).values
    border = best.gather(1, (k - 1).unsqueeze(1))
    scaled.index_copy_(0, limited, part.masked_fill_(part < border, float("-inf")))


def _keep_top_p(probabilities: Tensor, top_p: Tensor) -> None:
    """Zeroes what lies outside the row's top-p set, in place; the rest is not renormalised."""
    limited = (top_p < 1.0).nonzero().squeeze(1)
    if limited.numel() == 0:
        return
    p = top_p[limited].to(torch.float64).unsqueeze(1)
    part = probabilities[limited]
    border, kept, found = _top_p_border(part, p, min(_NARROW, part.shape[1]))
    flat = (~found).nonzero().squeeze(1)
    if flat.numel():
        wide_border, wide_kept, _ = _top_p_border(part[flat], p[flat], part.shape[1])
        border.index_copy_(0, flat, wide_border)
        kept.index_copy_(0, flat, wide_kept)
    equals = part == border
    equals_kept = kept - (part > border).sum(dim=-1, keepdim=True)
    outside = (part < border) | (equals & (equals.cumsum(dim=-1) > equals_kept))
    probabilities.index_copy_(0, limited, part.masked_fill_(outside, 0.0))


def _top_p_border(probabilities: Tensor, p: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Looks for each row's top-p set among its `width` greatest.

    Returns its least probability [R, 1], its size [R, 1] and whether it reached p [R]; where it did not, the
    set is wider than `width` (or rounding kept the whole row below p, and all of it is the set).
    """
    best = probabilities.topk(width, dim=-1).values
    mass = best.cumsum(dim=-1, dtype=torch.float64)
    # A token stays while those before it do not reach p; the first always does.
    kept = ((mass - best) < p).sum(dim=-1, keepdim=True).clamp_(min=1)
    return best.gather(1, kept - 1), kept, (mass[:, -1:] >= p).squeeze(1)
