"""The cache blocks that have names, as runs: what was computed in one go is found, shared and given away in one go.

Knows nothing about owners or unnamed blocks. A run is a stretch of one sequence's blocks; `above` it is the run with
the blocks before it. Runs branch where sequences part. Names are chained hashes (`core/prefix`), so a name says what
all blocks before it hold, and three things are always true:

- a name is known once, and the names before it are known too;
- whoever holds a run holds all above it;
- a run that nobody holds was let go no later than those above it.

So the oldest run that nobody holds has none below it and can be spent from its end. What a request costs hardly
depends on its blocks; a table of all names is too large for the processor's caches, and cost 0.7 us a block.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile

from bulletserve.core.errors import EngineError


class Run:
    """Blocks `start:end` of every sequence that holds it. No names: forgotten, nothing may follow it.

    `grows`: nobody but its maker ever held it to its end, so the maker may add to it.
    """

    __slots__ = ("above", "blocks", "grows", "holders", "names", "start")

    def __init__(self, above: "Run | None", names: list[bytes], blocks: list[int], holders: int, grows: bool) -> None:
        self.above = above
        self.start = above.end if above else 0
        self.names = names
        self.blocks = blocks
        self.holders = holders
        self.grows = grows

    @property
    def end(self) -> int:
        """Blocks of a sequence that ends with this run."""
        return self.start + len(self.blocks)


def path(tip: Run | None) -> Iterator[Run]:
    """A run and all above it, upwards."""
    while tip is not None:
        yield tip
        tip = tip.above


class PrefixRuns:
    """All runs by the name of their first block; `idle_blocks` counts the blocks of those that nobody holds."""

    def __init__(self) -> None:
        self.idle_blocks = 0
        self._run_at: dict[bytes, Run] = {}
        self._idle: OrderedDict[Run, None] = OrderedDict()

    def match(self, names: list[bytes]) -> tuple[list[Run], int]:
        """The runs that hold the longest known beginning of a sequence, and its blocks: the last may hold more."""
        runs: list[Run] = []
        known = 0
        while known < len(names) and (run := self._run_at.get(names[known])) is not None:
            runs.append(run)
            wanted = names[known : run.end]
            if wanted != run.names:
                same = takewhile(lambda pair: pair[0] == pair[1], zip(run.names, wanted, strict=False))
                return runs, known + sum(1 for _ in same)
            known = run.end
        return runs, known

    def hold(self, runs: list[Run], known: int) -> list[Run]:
        """One more holder for what `match` returned. Returns the runs, with no block more than those."""
        if runs and known < runs[-1].end:
            runs = [*runs[:-1], self._split(runs[-1], known - runs[-1].start)]
        for run in runs:
            if not run.holders:
                self._idle.pop(run, None)
                self.idle_blocks -= len(run.blocks)
            run.holders += 1
            run.grows = False
        return runs

    def name(self, tip: Run | None, names: list[bytes], blocks: list[int]) -> Run | None:
        """Name the blocks that follow `tip`, its holder's last run. Returns the holder's last run then.

        Nothing is named if another has that name or what comes before has none any more.
        """
        if names[0] in self._run_at or (tip is not None and not tip.names):
            return tip
        if tip is not None and tip.grows:
            tip.names += names
            tip.blocks += blocks
            return tip
        run = self._run_at[names[0]] = Run(tip, names, blocks, holders=1, grows=True)
        return run

    def let_go(self, tip: Run | None) -> list[int]:
        """One holder less for a run and all above it. Returns blocks of forgotten runs that nobody holds any more."""
        nameless: list[int] = []
        for run in path(tip):
            run.holders -= 1
            if run.holders:
                continue
            if run.names:
                self._idle[run] = None
                self.idle_blocks += len(run.blocks)
            else:
                nameless += run.blocks
        return nameless

    def spend(self, count: int) -> list[int]:
        """Give up `count` blocks that nobody holds, of which there must be as many: the oldest, ends first."""
        self.idle_blocks -= count
        spent: list[int] = []
        while (missing := count - len(spent)) > 0:
            run = next(iter(self._idle))
            if missing >= len(run.blocks):
                spent += run.blocks
                del self._idle[run], self._run_at[run.names[0]]
            else:
                spent += run.blocks[-missing:]
                del run.blocks[-missing:], run.names[-missing:]
        return spent

    def forget(self) -> list[int]:
        """Drop every name. Returns the blocks that nobody holds."""
        nameless = [block for run in self._idle for block in run.blocks]
        for run in self._run_at.values():
            run.names = []
        self._run_at.clear()
        self._idle.clear()
        self.idle_blocks = 0
        return nameless

    def idle_runs(self) -> list[Run]:
        """The runs that nobody holds, oldest first. Raises `EngineError` if the books are wrong."""
        runs = self._run_at.values()
        names = [name for run in runs for name in run.names]
        if len(set(names)) != len(names) or any(key != run.names[0] for key, run in self._run_at.items()):
            raise EngineError("a name is known twice or not found")
        if any(len(run.names) != len(run.blocks) for run in runs):
            raise EngineError("names and blocks disagree")
        if set(self._idle) != {run for run in runs if not run.holders}:
            raise EngineError("a run that somebody holds may be spent, or one that nobody holds may not")
        if self.idle_blocks != sum(len(run.blocks) for run in self._idle):
            raise EngineError("the count of cached blocks is wrong")
        return list(self._idle)

    def _split(self, run: Run, blocks: int) -> Run:
        """Cut the first blocks off a run; returns them as the run above it, held by the same, idle in no order yet."""
        upper = Run(run.above, run.names[:blocks], run.blocks[:blocks], run.holders, grows=False)
        run.above = upper
        run.start = upper.end
        del run.names[:blocks], run.blocks[:blocks]
        self._run_at[upper.names[0]] = upper
        self._run_at[run.names[0]] = run
        return upper
