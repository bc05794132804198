"""How much of a card's memory becomes KV cache: arithmetic over numbers that somebody else measured.

Knows nothing about torch, CUDA or a model. On a card

    total = taken before we started + weights + workspaces + CUDA's own + graphs + KV cache + what is left

and the cache is what remains when everything else has its room. Two limits hold at once: the share of the card that
`--gpu-memory-utilization` allows, and what other processes left free when we started. All sizes are bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bulletserve.core.errors import ConfigError

MARGIN_BYTES = 128 * 2**20
"""Never given away: an allocator rounds each tensor of the cache up to 2 MiB, and drivers take a little late."""

GIB = 2**30


@dataclass(frozen=True, slots=True)
class PartitionMemory:
    """What one partition costs: its CUDA graphs, `graph_bytes` each (an estimate, or what was measured).

    `label` is the partition in words ("100 + 32 SMs").
    """

    label: str
    graphs: int
    graph_bytes: int

    @property
    def total_bytes(self) -> int:
        """All its graphs together."""
        return self.graphs * self.graph_bytes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory of one card, shared out.

    `free_at_start_bytes` was read before we took anything, `free_now_bytes` with weights and workspaces in place and
    before the graphs and the cache are made. `spare_blocks` are made beside those that requests can have.
    """

    total_bytes: int
    free_at_start_bytes: int
    free_now_bytes: int
    weights_bytes: int
    workspace_bytes: int
    utilization: float
    block_bytes: int
    block_size: int
    partitions: tuple[PartitionMemory, ...] = ()
    spare_blocks: int = 1

    @property
    def graph_bytes(self) -> int:
        """The reserve for the graphs of all partitions."""
        return sum(partition.total_bytes for partition in self.partitions)

    @property
    def others_bytes(self) -> int:
        """What was taken before we started: other processes, and a CUDA context if there was one already."""
        return self.total_bytes - self.free_at_start_bytes

    @property
    def overhead_bytes(self) -> int:
        """Gone since the start beside weights and workspaces: loaded kernels, rounding, what others took meanwhile."""
        gone_bytes = self.free_at_start_bytes - self.free_now_bytes
        return max(0, gone_bytes - self.weights_bytes - self.workspace_bytes)

    @property
    def limit_bytes(self) -> int:
        """The most the whole engine may take: its share of the card, or what others left of it."""
        return min(int(self.utilization * self.total_bytes), self._most_bytes)

    @property
    def kv_bytes(self) -> int:
        """Room for the cache, spare blocks included; 0 where there is none.

        Together with the graphs it never exceeds what is free now.
        """
        return max(0, self._room_bytes)

    @property
    def block_room_bytes(self) -> int:
        """Room for the blocks that requests can have."""
        return self.total_blocks * self.block_bytes

    @property
    def total_blocks(self) -> int:
        """Blocks that requests can have."""
        return max(0, self.kv_bytes // self.block_bytes - self.spare_blocks)

    def check(self, tokens: int, source: str = "--max-model-len") -> None:
        """Raise `ConfigError` with the fix unless a request of `tokens` tokens fits; `source` is who asked for them."""
        blocks = max(1, math.ceil(tokens / self.block_size))
        if self.total_blocks >= blocks:
            return
        needed_bytes = (blocks + self.spare_blocks) * self.block_bytes
        raise ConfigError(
            f"{gib(needed_bytes - self._room_bytes)} of GPU memory are missing: the cache of one request of {tokens} "
            f"tokens ({source}) takes {gib(needed_bytes)}, and of the {gib(self.limit_bytes)} that the engine may take "
            f"{gib(self._taken_bytes)} go to weights, workspaces, graphs and CUDA itself. To fix it: "
            + ", or ".join(self._fixes(needed_bytes))
        )

    def describe(self, total_blocks: int | None = None, measured: Sequence[PartitionMemory] | None = None) -> str:
        """The shares as lines for people.

        `total_blocks`: how many were made, where it is not this budget's own number. `measured`: what the partitions
        cost after their graphs were captured, instead of the estimate.
        """
        blocks = self.total_blocks if total_blocks is None else total_blocks
        partitions = self.partitions if measured is None else tuple(measured)
        graphs_bytes = sum(partition.total_bytes for partition in partitions)
        cache_bytes = (blocks + self.spare_blocks) * self.block_bytes if blocks else 0
        left = self.free_now_bytes - graphs_bytes - cache_bytes
        kind = "reserved" if measured is None else "measured"
        lines = [
            f"GPU memory: {gib(self.total_bytes)}, {gib(self.others_bytes)} of it taken before, at most "
            f"{gib(self.limit_bytes)} for this engine (--gpu-memory-utilization {self.utilization:g})",
            f"  weights     {gib(self.weights_bytes)}",
            f"  workspaces  {gib(self.workspace_bytes)}",
            f"  CUDA itself {gib(self.overhead_bytes)}",
            f"  KV cache    {gib(cache_bytes)}: {blocks} blocks of {self.block_size} tokens, "
            f"{blocks * self.block_size} tokens",
            f"  graphs      {gib(graphs_bytes)} {kind} for {sum(p.graphs for p in partitions)} graphs",
            *(f"    {p.label}: {p.graphs} graphs, {p.total_bytes / 2**20:.0f} MiB" for p in partitions),
            f"  left free   {gib(max(0, left))}",
        ]
        return "\n".join(lines)

    @property
    def _taken_bytes(self) -> int:
        return self.weights_bytes + self.overhead_bytes + self.workspace_bytes + self.graph_bytes

    @property
    def _most_bytes(self) -> int:
        return self.free_at_start_bytes - MARGIN_BYTES

    @property
    def _free_room_bytes(self) -> int:
        return self.free_now_bytes - MARGIN_BYTES - self.graph_bytes

    @property
    def _room_bytes(self) -> int:
        """Below 0: what is missing already without a cache."""
        return min(self.limit_bytes - self._taken_bytes, self._free_room_bytes)

    def _fixes(self, needed_bytes: int) -> list[str]:
        """What each for itself would give the cache `needed_bytes`."""
        missing_bytes = needed_bytes - self._room_bytes
        fixes = []
        if self._free_room_bytes >= needed_bytes and self.limit_bytes + missing_bytes <= self._most_bytes:
            wanted = math.ceil((self.limit_bytes + missing_bytes) / self.total_bytes * 100) / 100
            fixes.append(f"raise --gpu-memory-utilization from {self.utilization:g} to {wanted:g}")
        elif self.others_bytes >= missing_bytes:
            fixes.append(f"end other processes on this GPU (they hold up to {gib(self.others_bytes)})")
        if self.total_blocks:
            fixes.append(f"use --max-model-len {self.total_blocks * self.block_size} or less")
        if self.graph_bytes >= missing_bytes:
            fixes.append(f"name fewer --decode-shares (the graphs of all partitions take {gib(self.graph_bytes)})")
        return fixes or ["take a smaller model or a GPU with more memory"]


def gib(size_bytes: int) -> str:
    """A size for people."""
    return f"{size_bytes / GIB:.1f} GiB"
