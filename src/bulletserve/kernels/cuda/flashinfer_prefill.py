"""FlashInfer's Hopper prefill attention (fa3) over the paged KV cache, planned by us for a share of the SMs.

Knows nothing about models, requests or streams. The library's kernel is persistent: as many programs as the device
has SMs, each with a list of (query tile, head) to do, made on the host. Its own plan deals them to all SMs, so that
a share of 100 of 132 SMs runs the 132 lists in two waves. Ours deals them to the share and leaves the other lists
empty; a tile's time is its keys plus a constant, and dealing the longest first to the least loaded ends all lists
together. Also unlike the library's plan, ours makes one copy to fixed device addresses, from a ring of pinned
buffers: nothing waits for the device, a plan can be made while the step before runs, and `run` can be captured in a
CUDA graph. Block ids are read from the seats' block tables where they lie.
"""

import importlib
import importlib.util
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bulletserve.core.errors import ConfigError

_TESTED = "0.6."  # we call what the library's wrapper classes call, which binds us to these versions
_TILE_ROWS = {64: 192, 128: 128}  # head dimension -> query rows of a tile of the library's kernel
_TILE_CONSTANT = 2  # a tile costs as much as its keys plus so many times its rows: the library's own estimate
_RING = 3  # plans whose copies may be under way at once
_CAUSAL = 1  # the library's code for the mask
_TOKENS_FIRST, _HEADS_FIRST = 0, 1  # and for K and V as [tokens, kv_heads, head_dim] or [kv_heads, tokens, head_dim]

Ints = NDArray[np.int32]


def available(head_dim: int, dtype: torch.dtype, window: int | None) -> str | None:
    """Why this kernel cannot serve a model of these shapes on the current device, or None if it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed: pip install 'bulletserve[cuda]'"
    version = importlib.import_module("flashinfer.version").__version__
    if not version.startswith(_TESTED):
        return f"FlashInfer {version} is not one of the versions this was made for ({_TESTED}*)"
    if torch.cuda.get_device_capability() != (9, 0):
        return "FlashInfer's fa3 kernels need a Hopper GPU"
    if head_dim not in _TILE_ROWS:
        return f"FlashInfer's fa3 kernel has no head dimension {head_dim}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer's fa3 kernel does not compute in {dtype}"
    if window is not None:
        return "FlashInfer's fa3 kernel reads the wrong values where a sliding window begins"
    return None


def deal_tiles(costs: Ints, sms: int) -> Ints:
    """Which of `sms` SMs does each tile, so that the sums of `costs` (descending) come out even: int32, as `costs`.

    Deals `sms` tiles at a time, the longest to the least loaded.
    """
    load = np.zeros(sms, dtype=np.int64)
    owner = np.empty(len(costs), dtype=np.int32)
    for first in range(0, len(costs), sms):
        hand = costs[first : first + sms]
        takers = np.argsort(load, kind="stable")[: len(hand)]
        owner[first : first + sms] = takers
        load[takers] += hand
    return owner


def list_works(starts: Ints, context: Ints, keys_at: Ints, heads: int, tile: int, sms: int) -> tuple[Ints, Ints]:
    """The library's plan: a list of works per SM, each a tile of `tile` query rows and a head of a segment.

    Returns works int32 [7, W] (tile, first row, where the keys begin, rows, keys, head and number of its segment),
    SM after SM and the longest first, and how many each of the `sms` SMs has.
    """
    new = np.diff(starts)
    tiles = -(-new // tile)
    segment = np.repeat(np.arange(len(new)), tiles)
    index = np.arange(len(segment)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    keys = np.minimum((context - new)[segment] + (index + 1) * tile, context[segment])
    cost = keys + _TILE_CONSTANT * tile
    longest = np.argsort(-cost, kind="stable")
    owner = deal_tiles(np.repeat(cost[longest], heads), sms)
    order = np.argsort(owner, kind="stable")
    chosen = np.repeat(longest, heads)[order]
    head = np.tile(np.arange(heads), len(longest))[order]
    which = segment[chosen]
    works = (index[chosen], starts[which], keys_at[which], new[which], context[which], head, which)
    return np.array(works, dtype=np.int32), np.bincount(owner, minlength=sms).astype(np.int32)


class FlashInferPrefill:
    """The kernel with the buffers of one lane; two lanes need two objects.

    `plan` stages a batch, `run` or `run_fresh` computes one layer of it, on the current stream. A plan holds for the
    runs issued after it and before the next plan; issue a lane's plans and runs in order, on one stream or on streams
    ordered by events. The first object of a process loads the library's compiled kernel, or compiles it.
    """

    def __init__(self, heads: int, head_dim: int, dtype: torch.dtype, max_tokens: int, max_segments: int) -> None:
        """`ConfigError` if the library cannot load or build its kernel."""
        self._heads = heads
        self._tile = _TILE_ROWS[head_dim]
        kernels = _kernels(head_dim, dtype)
        self._paged, self._ragged = kernels.paged_run, kernels.ragged_run
        # No window, no dependent launch, four absent tensors, no soft cap, scales of scores and values, no items.
        self._rest = (-1, False, None, None, None, None, 0.0, 1.0 / math.sqrt(head_dim), 1.0, 0)
        device = torch.device("cuda", torch.cuda.current_device())
        self._programs = torch.cuda.get_device_properties(device).multi_processor_count
        self._max_tokens, self._max_segments = max_tokens, max_segments
        works = (-(-max_tokens // self._tile) + max_segments) * heads
        works = -(-works // 4) * 4  # arrays start at multiples of 16 bytes
        self._works = works
        size = 7 * works + self._programs + 1
        self._device_plan = torch.zeros(size, dtype=torch.int32, device=device)
        self._host_plans = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
        self._copied = [torch.cuda.Event() for _ in range(_RING)]
        self._turn = 0
        # Byte offsets of the plan's arrays in the library's order, then its flag for another kind of schedule.
        arrays = [4 * works * i for i in range(8)]
        self._arrays = [*arrays[:6], arrays[7], arrays[6], 0]
        self._nothing = torch.zeros(16, dtype=torch.uint8, device=device)

    def plan(self, starts: Ints, context: Ints, seat: Ints, table_width: int, sms: int, fresh: bool) -> None:
        """Stages a batch: segment i is rows starts[i]..starts[i + 1], the last of `context`[i] tokens.

        `starts` [S + 1], `context` [S] and `seat` [S] lie on the host; `table_width` is the length of a seat's block
        table; `sms` the number of SMs of the stream that will run it; `fresh` says that it is for `run_fresh`: no
        segment has tokens before the batch. `ConfigError` if the batch is larger than this object was made for.
        """
        if len(context) > self._max_segments or starts[-1] > self._max_tokens:
            raise ConfigError(
                f"{starts[-1]} tokens in {len(context)} segments are more than the prefill attention was made for "
                f"({self._max_tokens} in {self._max_segments})"
            )
        assert not fresh or np.array_equal(context, np.diff(starts))
        slot = self._turn % _RING
        self._turn += 1
        self._copied[slot].synchronize()  # over long ago, unless the device is three plans behind
        keys_at = starts[:-1] if fresh else seat * table_width
        works, counts = list_works(starts, context, keys_at, self._heads, self._tile, sms)
        numbers = self._host_plans[slot].numpy()
        numbers[: 7 * self._works].reshape(7, self._works)[:, : works.shape[1]] = works
        limits = numbers[7 * self._works + 1 :]  # where each list ends; the first begins at 0
        limits[:sms] = np.cumsum(counts)
        limits[sms:] = works.shape[1]
        self._device_plan.copy_(self._host_plans[slot], non_blocking=True)
        self._copied[slot].record()

    def run(self, q: Tensor, kv: Tensor, tables: Tensor, out: Tensor) -> None:
        """One layer: `out` [T, heads * head_dim] from `q` [T, heads, head_dim] (may be a strided view).

        `kv` [blocks, 2, kv_heads, block_size, head_dim] already holds the new tokens; `tables` int32 [seats,
        table_width], contiguous. Rows of no segment are left as they are.
        """
        k, v = kv.unbind(1)
        plan, arrays = self._device_plan, self._arrays
        out = out.view(q.shape)
        self._paged(
            self._nothing,
            plan,
            arrays,
            q,
            k,
            v,
            plan,
            plan,
            tables,
            plan,
            out,
            None,
            _CAUSAL,
            _HEADS_FIRST,
            *self._rest,
        )

    def run_fresh(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """As `run`, for a batch planned as fresh: K and V are the new rows themselves, [T, kv_heads, head_dim].

        A fifth faster, because rows that lie side by side need no gathering. All rows must hold finite numbers, also
        those of no segment.
        """
        plan, arrays = self._device_plan, self._arrays
        out = out.view(q.shape)
        self._ragged(self._nothing, plan, arrays, q, k, v, plan, plan, out, None, _CAUSAL, _TOKENS_FIRST, *self._rest)


def _kernels(head_dim: int, dtype: torch.dtype) -> Any:
    """The library's compiled functions; its wrapper classes would plan for all SMs of the device.

    `ConfigError` if it cannot load or build them.
    """
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    types = (dtype, dtype, dtype, torch.int32)
    spec = modules.gen_batch_prefill_module("fa3", *types, head_dim, head_dim, 0, False, False, False)
    try:
        return spec.build_and_load()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"FlashInfer could not load or build its prefill kernel (it needs nvcc): {error}") from error
