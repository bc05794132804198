"""The ledger of cache blocks: who holds which block, and which blocks hold a known prefix.

Knows nothing about tensors, requests' phases or policies: it counts. A block is free, held (one or more owners)
or cached (nobody holds it, but its contents have a name and may be asked for again). Cached blocks count as
free: they are given away in least-recently-used order, the ends of sequences before their beginnings.

Block 0 is never given away: padding rows of a device may write there.
"""

from collections import Counter
from collections.abc import Sequence

from bulletserve.core.errors import EngineError
from bulletserve.scheduler.prefix_runs import PrefixRuns, Run

NULL_BLOCK = 0


class _Holding:
    """An owner's blocks in the order of its tokens. Those of `runs` have names, the rest are its own.

    The names of its first `known` blocks are known, by its own runs or by others': `stands` is the run where they end.
    """

    __slots__ = ("blocks", "epoch", "known", "runs", "stands")

    def __init__(self, blocks: list[int], runs: list[Run], known: int, epoch: int) -> None:
        self.blocks = blocks
        self.runs = runs
        self.known = known
        self.stands: Run | None = runs[-1] if runs else None
        self.epoch = epoch

    def own(self) -> list[int]:
        """Its blocks without names."""
        blocks, at = [], 0
        for run in self.runs:
            first = min(piece.start for piece in run.pieces())
            blocks += self.blocks[at:first]
            at = run.end
        return blocks + self.blocks[at:]


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
        self._epoch = 0

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

    def look_up(self, names: list[bytes]) -> int:
        """How many blocks of a sequence that begins with these names are in the cache. To be asked for is to be used:
        of those that nobody holds, these are given up last."""
        found, known = self._runs.match(names)
        self._runs.use(found)
        return known

    def allocate(self, owner: int, blocks: int, names: list[bytes]) -> int:
        """Give `blocks` blocks to a new owner, the first ones from the cache where their names are known.

        Returns how many came from the cache. Raises `EngineError` when there are not enough: nothing changes.
        """
        if owner in self._holdings:
            raise EngineError(f"request {owner} holds blocks already")
        found, hits = self._runs.match(names[:blocks])
        idle_hits = sum(count for run, count in found if not run.holders)
        if blocks - hits > self.free_blocks - idle_hits:
            raise EngineError(f"{blocks} blocks wanted, {self.free_blocks} free")
        shared = [block for run, count in found for block in run.blocks[:count]]
        runs = self._runs.hold(found)
        self._free += self._runs.spare
        self._runs.spare = []
        self._holdings[owner] = _Holding(shared + self._take(blocks - hits), runs, hits, self._epoch)
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

    def register(self, owner: int, names: list[bytes], end: int) -> bytes | None:
        """Name an owner's first `end` blocks, all of whose tokens are computed; `names` are at least as many.

        A block whose name another block has stays the owner's own; what follows it is named all the same. Nothing is
        named of an owner that was there when all names were forgotten. Returns the first name that there was not.
        """
        holding = self._holdings[owner]
        if not self.caching or end <= holding.known or holding.epoch != self._epoch:
            return None
        stands, known = self._runs.follow(holding.stands, names, holding.known, end)
        if known < end:
            tip = holding.runs[-1] if holding.runs else None
            stands = self._runs.name(tip, names[known:end], holding.blocks[known:end], known)
            if stands is not tip:
                holding.runs.append(stands)
        holding.stands, holding.known = stands, end
        return names[known] if known < end else None

    def release(self, owner: int) -> None:
        """Take back all blocks of an owner; named ones stay cached until they are needed."""
        holding = self._holdings.pop(owner)
        self._free += holding.own()
        self._free += self._runs.let_go(holding.runs)

    def forget_prefixes(self) -> None:
        """Drop every name; blocks that nobody holds become plainly free."""
        self._epoch += 1
        self._free += self._runs.forget()

    def check_integrity(self) -> None:
        """Raise `EngineError` unless every block is in exactly one place and every count is right."""
        places = list(self._free)
        holders: Counter[Run] = Counter()
        for holding in self._holdings.values():
            places += holding.own()
            for run in holding.runs:
                for piece in run.pieces():
                    holders[piece] += 1
                    if piece.upper is not None and piece.start != piece.upper.end:
                        raise EngineError("a run does not begin where its upper piece ends")
                    if piece.blocks != holding.blocks[piece.start : piece.end]:
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
