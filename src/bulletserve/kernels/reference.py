"""What each kernel computes, said as plainly as possible in float32: the truth that tests compare with.

Knows nothing about speed. Every function takes tensors of any float dtype and returns float32; caches are read
token by token through their block tables.
"""

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] / sqrt(mean of squares + eps) * weight."""
    x = x.float()
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight.float()


def rope(heads: Tensor, angles: Tensor) -> Tensor:
    """`heads` [T, N, D] turned by `angles` [T, D / 2]: dimension i goes with i + D/2 as one complex number."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times `weight` [out, in] transposed, plus `bias` [out]."""
    y = x.float() @ weight.float().T
    return y if bias is None else y + bias.float()


def cached_token(kv: Tensor, block_table: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """K and V [kv_heads, head_dim] of the token at `position` of the sequence with `block_table`."""
    block_size = kv.shape[3]
    page = kv[int(block_table[position // block_size])]
    return page[0, :, position % block_size].float(), page[1, :, position % block_size].float()


def attention(q: Tensor, kv: Tensor, block_table: Tensor, first: int, window: int | None = None) -> Tensor:
    """Queries [T, heads, head_dim] at positions `first`.. of one sequence, each against what it may see.

    Returns [T, heads * head_dim].
    """
    outputs = []
    for offset, query in enumerate(q.float()):
        position = first + offset
        begin = 0 if window is None else max(0, position - window + 1)
        tokens = [cached_token(kv, block_table, p) for p in range(begin, position + 1)]
        group = q.shape[1] // kv.shape[2]
        k, v = (torch.stack(side).repeat_interleave(group, dim=1) for side in zip(*tokens, strict=True))
        scores = torch.einsum("hd,lhd->hl", query, k) / math.sqrt(q.shape[2])
        outputs.append(torch.einsum("hl,lhd->hd", scores.softmax(dim=-1), v).flatten())
    return torch.stack(outputs)


def sampling_distribution(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The probabilities [V] from which one row `logits` [V] is sampled, by sorting everything."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), logits.shape[0]).float()
    scaled = logits.double() / temperature
    if 0 < top_k < logits.shape[0]:
        scaled[scaled < scaled.sort(descending=True).values[top_k - 1]] = float("-inf")
    probabilities = scaled.softmax(dim=-1)
    if top_p < 1:
        mass, kept = 0.0, torch.zeros_like(probabilities)
        for token in probabilities.sort(descending=True, stable=True).indices.tolist():
            kept[token] = probabilities[token]
            mass += float(probabilities[token])
            if mass >= top_p:
                break
        probabilities = kept / kept.sum()
    return probabilities.float()
