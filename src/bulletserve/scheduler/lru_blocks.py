"""Blocks in the order in which they were last let go, oldest first.

Knows nothing about what is in them. A queue that forgets lazily: a block that is taken out of the middle stays in the
queue as a stale entry, which is skipped when it comes up. Entries of one block come up in the order in which they
were added, so a count of stale ones per block is all that is needed. Unlike an ordered hash table it never rehashes
in the middle of a turn.
"""

from collections import deque
from collections.abc import Iterator


class LruBlocks:
    """A set of block ids below `num_blocks`; adding, taking out and taking the oldest take constant time."""

    def __init__(self, num_blocks: int) -> None:
        self._most = 2 * num_blocks
        self._entries: deque[int] = deque()
        self._stale = [0] * num_blocks
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        stale: dict[int, int] = {}
        for block in self._entries:
            seen = stale.get(block, 0)
            stale[block] = seen + 1
            if seen == self._stale[block]:
                yield block

    def extend(self, blocks: list[int]) -> None:
        """Add blocks that are not in the set, the last one as the newest."""
        self._entries.extend(blocks)
        self._count += len(blocks)
        if len(self._entries) > self._most:
            self._entries = deque(self)
            self._stale = [0] * len(self._stale)

    def remove(self, block: int) -> None:
        """Take out a block that is in the set."""
        self._stale[block] += 1
        self._count -= 1

    def pop(self, count: int) -> list[int]:
        """Take out the `count` oldest blocks; there must be as many."""
        take, stale = self._entries.popleft, self._stale
        blocks: list[int] = []
        while len(blocks) < count:
            block = take()
            if stale[block]:
                stale[block] -= 1
            else:
                blocks.append(block)
        self._count -= count
        return blocks

    def clear(self) -> None:
        """Take out everything."""
        self._entries.clear()
        self._stale = [0] * len(self._stale)
        self._count = 0
