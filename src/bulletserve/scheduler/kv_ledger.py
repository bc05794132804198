"""The ledger of cache blocks: who holds which block, and which blocks hold a known prefix.

Knows nothing about tensors, requests' phases or policies: it counts. A block is free, held (one or more owners)
or cached (nobody holds it, but its contents have a name and may be asked for again). Cached blocks count as
free: they are given away in least-recently-used order, the ends of sequences before their beginnings.

Block 0 is never given away: padding rows of a device may write there.
"""

from collections import deque
from collections.abc import Sequence

from bulletserve.core.errors import EngineError
from bulletserve.scheduler.lru_blocks import LruBlocks

NULL_BLOCK = 0
_NO_NAME = b""


class KvLedger:
    """Blocks 1..num_blocks-1 with reference counts and, when `caching`, names for full blocks."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError("a ledger needs at least two blocks of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._free: deque[int] = deque(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._hash_of = [_NO_NAME] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._cached = LruBlocks(num_blocks)
        self._held: dict[int, list[int]] = {}

    @property
    def total_blocks(self) -> int:
        """Blocks that can be given away."""
        return self.num_blocks - 1

    @property
    def free_blocks(self) -> int:
        """Blocks that can be given away now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody holds."""
        return self.total_blocks - self.free_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def held(self, owner: int) -> Sequence[int]:
        """The blocks of an owner, in the order of its tokens."""
        return self._held[owner]

    def holds(self, owner: int) -> bool:
        """Whether the owner holds anything."""
        return owner in self._held

    def allocate(self, owner: int, blocks: int, hashes: Sequence[bytes]) -> int:
        """Give `blocks` blocks to a new owner, the first ones from the cache where the hashes are known.

        Returns how many came from the cache. Raises `EngineError` when there are not enough: nothing changes.
        """
        if owner in self._held:
            raise EngineError(f"request {owner} holds blocks already")
        hits = self._match(hashes[:blocks])
        idle_hits = sum(1 for block in hits if not self._references[block])
        if blocks - len(hits) > self.free_blocks - idle_hits:
            raise EngineError(f"{blocks} blocks wanted, {self.free_blocks} free")
        for block in hits:
            if not self._references[block]:
                self._cached.remove(block)
            self._references[block] += 1
        self._held[owner] = hits + self._take(blocks - len(hits))
        return len(hits)

    def extend(self, owners: Sequence[int]) -> list[int]:
        """Give one more block to each owner. Raises `EngineError` when there are not enough: nothing changes."""
        if len(owners) > self.free_blocks:
            raise EngineError(f"{len(owners)} blocks wanted, {self.free_blocks} free")
        blocks = self._take(len(owners))
        held = self._held
        for owner, block in zip(owners, blocks, strict=True):
            held[owner].append(block)
        return blocks

    def register(self, owner: int, first: int, names: Sequence[bytes]) -> None:
        """Name an owner's blocks from its `first` on, all of whose tokens are computed.

        An equal block known already keeps the name.
        """
        if not self.caching:
            return
        hash_of, block_of = self._hash_of, self._block_of
        blocks = self._held[owner][first : first + len(names)]
        for block, name in zip(blocks, names, strict=True):
            if hash_of[block] is _NO_NAME and name not in block_of:
                hash_of[block] = name
                block_of[name] = block

    def release(self, owner: int) -> None:
        """Take back all blocks of an owner; named ones stay cached until they are needed."""
        references, hash_of, free = self._references, self._hash_of, self._free
        named: list[int] = []
        for block in reversed(self._held.pop(owner)):
            references[block] -= 1
            if references[block]:
                continue
            if hash_of[block] is _NO_NAME:
                free.append(block)
            else:
                named.append(block)
        self._cached.extend(named)

    def forget_prefixes(self) -> None:
        """Drop every name; blocks that nobody holds become plainly free."""
        for block in self._block_of.values():
            self._hash_of[block] = _NO_NAME
        self._block_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def check_integrity(self) -> None:
        """Raise `EngineError` unless every block is in exactly one place and every count is right."""
        counts = [0] * self.num_blocks
        for blocks in self._held.values():
            for block in blocks:
                counts[block] += 1
        if counts != self._references:
            raise EngineError("reference counts differ from what owners hold")
        idle = list(self._free) + list(self._cached)
        if len(set(idle)) != len(idle) or any(counts[block] for block in idle) or NULL_BLOCK in idle:
            raise EngineError("a free block is held, listed twice or the null block")
        if len(idle) + sum(1 for count in counts if count) != self.total_blocks:
            raise EngineError("blocks were lost or made up")
        named = {block: name for block, name in enumerate(self._hash_of) if name}
        if named != {block: name for name, block in self._block_of.items()}:
            raise EngineError("names and blocks disagree")
        if any(self._hash_of[b] for b in self._free) or any(b not in named for b in self._cached):
            raise EngineError("a free block has a name or a cached one has none")

    def _match(self, hashes: Sequence[bytes]) -> list[int]:
        hits: list[int] = []
        if self.caching:
            for name in hashes:
                block = self._block_of.get(name)
                if block is None:
                    break
                hits.append(block)
        return hits

    def _take(self, count: int) -> list[int]:
        free, hash_of, references = self._free, self._hash_of, self._references
        blocks = [free.popleft() for _ in range(min(count, len(free)))]
        if len(blocks) < count:
            oldest = self._cached.pop(count - len(blocks))
            for block in oldest:
                del self._block_of[hash_of[block]]
                hash_of[block] = _NO_NAME
            blocks += oldest
        for block in blocks:
            references[block] = 1
        return blocks
