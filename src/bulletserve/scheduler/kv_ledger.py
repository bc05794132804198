"""The ledger of cache blocks: who holds which block, and which blocks hold a known prefix.

Knows nothing about tensors, requests' phases or policies: it counts. A block is free, held (one or more owners)
or cached (nobody holds it, but its contents have a name and may be asked for again). Cached blocks count as
free: they are given away in least-recently-used order, the ends of sequences before their beginnings.

Block 0 is never given away: padding rows of a device may write there.
"""

from collections import Counter
from collections.abc import Sequence

from bulletserve.core.errors import EngineError
from bulletserve.scheduler.prefix_runs import PrefixRuns, Run, path

NULL_BLOCK = 0


class _Holding:
    """An owner's blocks in the order of its tokens. Those of `tip` and above have names, the rest are its own."""

    __slots__ = ("blocks", "tip")

    def __init__(self, blocks: list[int], tip: Run | None) -> None:
        self.blocks = blocks
        self.tip = tip

    @property
    def named(self) -> int:
        return self.tip.end if self.tip else 0


class KvLedger:
    """Blocks 1..num_blocks-1 and, when `caching`, names for full blocks."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError("a ledger needs at least two blocks of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._free = list(range(num_blocks - 1, 0, -1))
        self._runs = PrefixRuns()
        self._holdings: dict[int, _Holding] = {}

    @property
    def total_blocks(self) -> int:
        """Blocks that can be given away."""
        return self.num_blocks - 1

    @property
    def free_blocks(self) -> int:
        """Blocks that can be given away now, cached ones included."""
        return len(self._free) + self._runs.idle_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody holds."""
        return self.total_blocks - self.free_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def held(self, owner: int) -> Sequence[int]:
        """The blocks of an owner, in the order of its tokens."""
        return self._holdings[owner].blocks

    def holds(self, owner: int) -> bool:
        """Whether the owner holds anything."""
        return owner in self._holdings

    def knows(self, names: list[bytes]) -> bool:
        """Whether a sequence that begins with these names would be found."""
        return self._runs.match(names)[1] == len(names)

    def allocate(self, owner: int, blocks: int, names: list[bytes]) -> int:
        """Give `blocks` blocks to a new owner, the first ones from the cache where their names are known.

        Returns how many came from the cache. Raises `EngineError` when there are not enough: nothing changes.
        """
        if owner in self._holdings:
            raise EngineError(f"request {owner} holds blocks already")
        runs, hits = self._runs.match(names[:blocks])
        idle_hits = sum(min(run.end, hits) - run.start for run in runs if not run.holders)
        if blocks - hits > self.free_blocks - idle_hits:
            raise EngineError(f"{blocks} blocks wanted, {self.free_blocks} free")
        runs = self._runs.hold(runs, hits)
        found = [block for run in runs for block in run.blocks]
        self._holdings[owner] = _Holding(found + self._take(blocks - hits), runs[-1] if runs else None)
        return hits

    def extend(self, owners: Sequence[int]) -> list[int]:
        """Give one more block to each owner. Raises `EngineError` when there are not enough: nothing changes."""
        if len(owners) > self.free_blocks:
            raise EngineError(f"{len(owners)} blocks wanted, {self.free_blocks} free")
        blocks = self._take(len(owners))
        holdings = self._holdings
        for owner, block in zip(owners, blocks, strict=True):
            holdings[owner].blocks.append(block)
        return blocks

    def register(self, owner: int, names: list[bytes], end: int) -> None:
        """Name an owner's first `end` blocks, all of whose tokens are computed; `names` are at least as many.

        A block whose name another block has stays the owner's own, and so do all that follow it, as long as the other
        block is known.
        """
        holding = self._holdings[owner]
        first = holding.named
        if self.caching and first < end:
            holding.tip = self._runs.name(holding.tip, names[first:end], holding.blocks[first:end])

    def release(self, owner: int) -> None:
        """Take back all blocks of an owner; named ones stay cached until they are needed."""
        holding = self._holdings.pop(owner)
        self._free += holding.blocks[holding.named :]
        self._free += self._runs.let_go(holding.tip)

    def forget_prefixes(self) -> None:
        """Drop every name; blocks that nobody holds become plainly free."""
        self._free += self._runs.forget()

    def check_integrity(self) -> None:
        """Raise `EngineError` unless every block is in exactly one place and every count is right."""
        places = list(self._free)
        holders: Counter[Run] = Counter()
        for holding in self._holdings.values():
            places += holding.blocks[holding.named :]
            for run in path(holding.tip):
                holders[run] += 1
                if run.start != (run.above.end if run.above else 0):
                    raise EngineError("a run does not begin where the one above it ends")
                if run.blocks != holding.blocks[run.start : run.end]:
                    raise EngineError("an owner's blocks are not those of its runs")
        if any(run.holders != count for run, count in holders.items()):
            raise EngineError("counts of holders differ from what owners hold")
        places += [block for run in (*holders, *self._runs.idle_runs()) for block in run.blocks]
        if sorted(places) != list(range(1, self.num_blocks)):
            raise EngineError("a block is lost, in two places or made up")

    def _take(self, count: int) -> list[int]:
        free = self._free
        if count > len(free):
            free += self._runs.spend(count - len(free))
        kept = len(free) - count
        taken = free[kept:]
        del free[kept:]
        return taken
