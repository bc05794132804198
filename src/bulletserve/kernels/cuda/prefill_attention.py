"""Causal attention of prefill rows against the paged KV cache, on a given number of SMs, ready for CUDA graphs.

Knows nothing about models, requests or streams. Everything that changes from step to step lies in device memory
(`PrefillSegments`), so one captured launch serves every batch that fits its bucket.

Prefill attention is bound by arithmetic: 4 * head_dim operations per (query, visible key) pair and head. A tile is
128 rows: the query heads of one KV head, folded into the rows beside the tokens, so that a K/V block that was loaded
is used by the whole group and little of the diagonal is wasted. As many programs as SMs take tiles from a counter,
segments with the longest context first and the longest tile of each first, so that a share's SMs end together.
K and V go to shared memory in asynchronous copies, some blocks ahead of the tensor cores.
"""

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from bulletserve.core.errors import ConfigError

_MAX_SEGMENTS = 128  # programs rank the segments against each other when they start
HEAD_DIMS = (64, 96, 128)
_WIDE_TILE_BYTES = 164352  # shared memory of a tile of 128 rows and 128 keys at head dimension 128


class PrefillSegments:
    """Which rows of a prefill batch belong to which sequence: device buffers at fixed addresses.

    `starts` int32 [S + 1] (segment i is rows starts[i]..starts[i + 1]), `context` int32 [S] (tokens of its sequence,
    the segment's own included and last), `seat` int32 [S] (its row of the block tables), `count` int32 [1] (segments
    in use). They are views of one `packed` tensor, so that one copy stages a step. Rows that no segment covers are
    padding. One object serves one lane: it also holds the counter from which a launch's programs take their tiles,
    so two launches that use it must not overlap.
    """

    def __init__(self, max_segments: int, device: torch.device, packed: Tensor | None = None) -> None:
        """`packed` int32 [3 * max_segments + 2] may be somebody else's: starts, context, seat, count in this order."""
        if not 1 <= max_segments <= _MAX_SEGMENTS:
            raise ConfigError(f"a prefill batch holds 1 to {_MAX_SEGMENTS} segments, not {max_segments}")
        self.max_segments = max_segments
        if packed is None:
            packed = torch.zeros(3 * max_segments + 2, dtype=torch.int32, device=device)
        self.packed = packed
        self.starts, self.context, self.seat, self.count = self.packed.split(
            [max_segments + 1, max_segments, max_segments, 1]
        )
        self.tickets = torch.zeros(2, dtype=torch.int32, device=device)

    def host_buffer(self) -> Tensor:
        """A host tensor for `stage`, pinned where the segments are on a GPU."""
        return torch.zeros(self.packed.shape, dtype=torch.int32, pin_memory=self.packed.is_cuda)

    def stage(self, host: Tensor, starts: Sequence[int], context: Sequence[int], seat: Sequence[int]) -> None:
        """Writes a step into `host` (of `host_buffer`) and copies it to the device on the current stream.

        `host` must stay as it is until that copy has run. `ConfigError` if there are more segments than fit.
        """
        segments = len(context)
        if segments > self.max_segments:
            raise ConfigError(f"{segments} segments in a prefill batch made for {self.max_segments}")
        numbers = host.numpy()
        numbers[: segments + 1] = starts
        numbers[self.max_segments + 1 :][:segments] = context
        numbers[2 * self.max_segments + 1 :][:segments] = seat
        numbers[-1] = segments
        self.packed.copy_(host, non_blocking=True)


@triton.jit
def _prefill_attention_kernel(
    q,
    kv,
    tables,
    starts,
    context,
    seat,
    count,
    tickets,
    out,
    scale,
    q_stride,
    out_stride,
    table_stride,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP
    PAGE: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    programs = tl.num_programs(0)
    live = tl.load(count)

    # Each segment's first tile in the common order: behind all tiles of segments with a longer context.
    column = tl.arange(0, SEGMENTS)
    column_context = tl.load(context + column, mask=column < live, other=0)
    column_rows = tl.load(starts + column + 1, mask=column < live, other=0)
    column_rows -= tl.load(starts + column, mask=column < live, other=0)
    tiles = (column_rows + TOKENS - 1) // TOKENS * KV_HEADS
    line = tl.arange(0, SEGMENTS)[:, None]
    line_context = tl.load(context + line, mask=line < live, other=0)
    line_rows = tl.load(starts + line + 1, mask=line < live, other=0)
    line_rows -= tl.load(starts + line, mask=line < live, other=0)
    before = (line_context > column_context[None, :]) | ((line_context == column_context[None, :]) & (line < column))
    first_tile = tl.sum(tl.where(before, (line_rows + TOKENS - 1) // TOKENS * KV_HEADS, 0), 0)
    total = tl.sum(tiles, 0)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    tile = tl.program_id(0)
    while tile < total:
        following = programs + tl.atomic_add(tickets, 1)
        here = (first_tile <= tile) & (tile < first_tile + tiles)
        segment = tl.sum(tl.where(here, column, 0), 0)
        within = tile - tl.sum(tl.where(here, first_tile, 0), 0)
        head = within % KV_HEADS
        length = tl.sum(tl.where(here, column_rows, 0), 0)
        keys = tl.sum(tl.where(here, column_context, 0), 0)
        begin = tl.load(starts + segment)
        table = tables + tl.load(seat + segment).to(tl.int64) * table_stride

        # Tiles are counted from the segment's end: only the one with the fewest keys can be short.
        last = length - within // KV_HEADS * TOKENS
        token = last - TOKENS + row // GROUP
        real = (token >= 0) & (row < TOKENS * GROUP)
        position = keys - length + tl.minimum(tl.maximum(token, 0), last - 1)
        newest = keys - length + last - 1
        oldest = keys - length + tl.maximum(last - TOKENS, 0)
        lanes = (real[:, None] & (dim < HEAD_DIM)[None, :]) if WIDTH != HEAD_DIM else real[:, None]
        column_offset = (head * GROUP + row % GROUP) * HEAD_DIM
        q_row = (begin + token).to(tl.int64) * q_stride + column_offset
        query = tl.load(q + q_row[:, None] + dim[None, :], mask=lanes, other=0.0)

        best = tl.full((ROWS,), float("-inf"), tl.float32)
        mass = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, WIDTH), tl.float32)
        first_key = 0
        if HAS_WINDOW:
            first_key = tl.maximum(oldest - window + 1, 0)
        for key_start in tl.range(first_key, newest + 1, KEYS, num_stages=STAGES):
            key = key_start + tl.arange(0, KEYS)
            known = key <= newest
            block = tl.load(table + key // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
            k_row = block * (2 * PAGE) + (head * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
            cells = (known[:, None] & (dim < HEAD_DIM)[None, :]) if WIDTH != HEAD_DIM else known[:, None]
            k_cell = kv + k_row[:, None] + dim[None, :]
            k = tl.load(k_cell, mask=cells, other=0.0)
            scores = tl.dot(query, tl.trans(k))
            masked = key_start + KEYS > oldest + 1
            if HAS_WINDOW:
                masked = masked | (key_start <= newest - window)
            if masked:
                seen = key[None, :] <= position[:, None]
                if HAS_WINDOW:
                    seen = seen & (key[None, :] > position[:, None] - window)
                scores = tl.where(seen, scores, -1.0e30)  # finite: a row may see nothing of a whole tile
            higher = tl.maximum(best, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - higher[:, None])
            fade = tl.exp2(best - higher)
            mass = mass * fade + tl.sum(weights, 1)
            mixed = mixed * fade[:, None]
            v = tl.load(k_cell + PAGE, mask=cells, other=0.0)
            mixed = tl.dot(weights.to(v.dtype), v, mixed)
            best = higher

        out_row = (begin + token).to(tl.int64) * out_stride + column_offset
        mixed = mixed / mass[:, None]
        tl.store(out + out_row[:, None] + dim[None, :], mixed.to(out.dtype.element_ty), mask=lanes)
        tile = following

    # The last program to leave makes the counter ready for the next launch.
    if tl.atomic_add(tickets + 1, 1) == programs - 1:
        tl.store(tickets, 0)
        tl.store(tickets + 1, 0)


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    segments: PrefillSegments,
    out: Tensor,
    sms: int,
    window: int | None = None,
) -> None:
    """Writes into `out` [T, heads * head_dim] what each row of `q` [T, heads, head_dim] sees of its sequence.

    `q` may be a strided view of packed rows; its heads lie side by side. `kv` [blocks, 2, kv_heads, block_size,
    head_dim] already holds K and V of the new tokens; `tables` int32 [seats, max_blocks]. A query sees itself and
    what came before it, with `window` only the `window` - 1 tokens before it. Rows of no segment are left as they
    are. `sms` says how many SMs the current stream has. Cache places that no row may see are never used, whatever
    they hold. `ConfigError` for shapes the kernel does not have.
    """
    _, heads, head_dim = q.shape
    kv_heads, block_size = kv.shape[2], kv.shape[3]
    group = heads // kv_heads
    if head_dim not in HEAD_DIMS:
        raise ConfigError(f"the prefill attention kernel has head dimensions {HEAD_DIMS}, not {head_dim}")
    if block_size & (block_size - 1):
        raise ConfigError(f"KV block sizes are powers of two, not {block_size}")
    rows = max(_tile_rows(q.shape[0], group, kv_heads, sms), triton.next_power_of_2(group))
    _prefill_attention_kernel[(sms,)](
        q,
        kv,
        tables,
        segments.starts,
        segments.context,
        segments.seat,
        segments.count,
        segments.tickets,
        out,
        math.log2(math.e) / math.sqrt(head_dim),
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        window or 0,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        ROWS=rows,
        KEYS=_tile_keys(rows, q.device),
        SEGMENTS=triton.next_power_of_2(segments.max_segments),
        HAS_WINDOW=window is not None,
        STAGES=3,
        num_warps=8 if rows >= 128 else 4,
    )


def _tile_rows(tokens: int, group: int, kv_heads: int, sms: int) -> int:
    """128 rows a tile, or 64 where that still leaves SMs without work."""
    return 128 if -(-tokens * group // 128) * kv_heads * 2 > sms else 64


def _tile_keys(rows: int, device: torch.device) -> int:
    """Keys loaded at a time: 128 keep the tensor cores busier, where there is shared memory for them."""
    if rows < 128 or device.type != "cuda":
        return 64
    return 128 if _shared_bytes(device.index or 0) >= _WIDE_TILE_BYTES else 64


@functools.cache
def _shared_bytes(device: int) -> int:
    """Shared memory that one program may have."""
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])
