"""Attention over a paged KV cache: writing keys and values, and reading them for prefill and decode.

Knows nothing about models, sequences or who owns a block. One layer's cache is one tensor
`kv` [blocks, 2, kv_heads, block_size, head_dim], keys at index 0 and values at 1 of the second dimension
(FlashInfer's HND pages), so that one `index_select` gathers K and V of any rows into the dense
[rows * kv_heads, context, head_dim] that batched products want. The indices for it are the same for all layers:
`page_index` and `slot_index` make them once a step. The cache must hold finite numbers everywhere, also where
nothing was written yet: masked places are multiplied by zero, not skipped.

Prefill is bound by arithmetic, decode by reading the cache. Query heads that share a KV head are folded into
the query length, so K and V are read once per group. Batched products with scores in the model's dtype are
1.3 to 2 times as fast as torch's fused CPU kernel (docs/LOG.md), which wins for a lone decode row only.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_QUERY_CHUNK = 128  # queries scored at once in prefill: keys after a chunk are skipped, not masked
_FUSED_PAIRS = 8  # up to so many (row, KV head) pairs, the fused kernel's single launch wins in decode


def slot_index(slots: Tensor, kv: Tensor) -> Tensor:
    """Where `write_kv` puts each head's K and V of tokens at `slots` int64 [T]: int64 [T * 2 * kv_heads].

    A slot is block_id * block_size + offset. Slots of one step must differ from each other.
    """
    heads, block_size = 2 * kv.shape[2], kv.shape[3]
    block, offset = slots // block_size, slots % block_size
    head = torch.arange(heads, device=slots.device)
    return ((block.unsqueeze(1) * heads + head) * block_size + offset.unsqueeze(1)).view(-1)


def write_kv(kv: Tensor, rows: Tensor, index: Tensor) -> None:
    """Stores `rows` [T, 2 * kv_heads, head_dim] (heads of K, then of V); `index` from `slot_index`."""
    head_dim = kv.shape[4]
    kv.view(-1, head_dim).index_copy_(0, index, rows.reshape(-1, head_dim))


def page_index(block_tables: Tensor, tokens: int, kv: Tensor) -> Tensor:
    """Which pages hold the first `tokens` tokens of each row: int64 [2 * B * kv_heads * blocks].

    `block_tables` int64 [B, >= blocks of `tokens`]; entries beyond a row's own blocks may be any valid id.
    """
    kv_heads, block_size = kv.shape[2], kv.shape[3]
    blocks = block_tables[:, : -(-tokens // block_size)]
    side = torch.arange(2, device=blocks.device).view(2, 1, 1, 1)
    head = torch.arange(kv_heads, device=blocks.device).view(1, 1, kv_heads, 1)
    return ((blocks[None, :, None, :] * 2 + side) * kv_heads + head).view(-1)


def gather_kv(kv: Tensor, pages: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """K and V of whole blocks of `rows` rows, each [rows * kv_heads, blocks * block_size, head_dim], dense.

    `pages` from `page_index` for the same rows. What lies beyond a row's tokens is for the reader to cut or mask.
    """
    block_size, head_dim = kv.shape[3:]
    gathered = kv.view(-1, block_size * head_dim).index_select(0, pages)
    k, v = gathered.view(2, rows * kv.shape[2], -1, head_dim).unbind(0)
    return k, v


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """One sequence's T newest tokens against its whole context, causally.

    `q` [T, heads, head_dim]; `k`, `v` [kv_heads, context, head_dim], of which the last T tokens are the
    queries' own. A query sees itself and the `window` - 1 tokens before it. Returns [T, heads * head_dim].
    """
    tokens, heads, head_dim = q.shape
    kv_heads, context = k.shape[0], k.shape[1]
    group, past = heads // kv_heads, context - tokens
    q = (q * (1.0 / math.sqrt(head_dim))).view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k_columns = k.transpose(1, 2)
    out = q.new_empty(tokens, kv_heads, group, head_dim)
    size = min(_QUERY_CHUNK, tokens)
    hidden = q.new_full((size, size), float("-inf"))
    later = hidden.triu(1)
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        count, end = stop - start, past + stop
        begin = 0 if window is None else max(0, past + start - window + 1)
        queries = q[:, :, start:stop].reshape(kv_heads, group * count, head_dim)
        scores = torch.bmm(queries, k_columns[:, :, begin:end]).view(kv_heads, group, count, end - begin)
        scores[..., -count:].add_(later[:count, :count])
        if window is not None and end > window:
            # Query r is at position past + start + r, key c at begin + c: too old where c - r <= `diagonal`.
            diagonal, width = past + start - begin - window, min(count, end - begin)
            scores[..., :width].add_(hidden[:count, :width].tril(diagonal))
        weights = scores.softmax(dim=-1).view(kv_heads, group * count, end - begin)
        mixed = torch.bmm(weights, v[:, begin:end]).view(kv_heads, group, count, head_dim)
        out[start:stop] = mixed.permute(2, 0, 1, 3)
    return out.view(tokens, heads * head_dim)


def decode_mask(lengths: Tensor, max_length: int, window: int | None, kv: Tensor) -> Tensor:
    """What each decode row may see of its gathered blocks, as an additive mask in kv's dtype.

    `lengths` int64 [B] count the row's own token, `max_length` is the greatest. Returns
    [B, 1, 1, blocks * block_size]: whole blocks, because products over odd lengths are slower than masked ones
    and every new length would be a new shape to the library.
    """
    block_size = kv.shape[3]
    key = torch.arange(-(-max_length // block_size) * block_size, device=kv.device)
    end = lengths.unsqueeze(1)
    hidden = key >= end
    if window is not None:
        hidden |= key < end - window
    return kv.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None, :]


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One new token of each of B sequences against that sequence's context.

    `q` [B, heads, head_dim]; `k`, `v` [B * kv_heads, length, head_dim] from `gather_kv`; `mask` [B, 1, 1, length]
    from `decode_mask`. Returns [B, heads * head_dim].
    """
    rows, heads, head_dim = q.shape
    pairs, length = k.shape[0], k.shape[1]
    kv_heads, group = pairs // rows, heads * rows // pairs
    if pairs <= _FUSED_PAIRS:
        shape = (rows, kv_heads, length, head_dim)
        fused = F.scaled_dot_product_attention(
            q.view(rows, kv_heads, group, head_dim), k.view(shape), v.view(shape), attn_mask=mask
        )
        return fused.reshape(rows, heads * head_dim)
    queries = q.reshape(pairs, group, head_dim)
    bias = mask.expand(rows, kv_heads, 1, length).reshape(pairs, 1, length)
    scores = torch.baddbmm(bias, queries, k.transpose(1, 2), alpha=1.0 / math.sqrt(head_dim))
    return torch.bmm(scores.softmax(dim=-1), v).view(rows, heads * head_dim)
