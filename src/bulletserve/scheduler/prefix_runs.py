"""The cache blocks that have names, as runs: what was computed in one go is found, shared and given away in one go.

Knows nothing about owners or unnamed blocks. A run is a stretch of some sequence's blocks, found by the name of its
first. Names are chained hashes (`core/prefix`): a name says what its block and all before it hold, so a run may follow
any run that ends, or is left, where it begins, whoever computed them. What a request costs hardly depends on its
blocks; a table of all names is too large for the processor's caches, and cost 0.7 us a block.

Where a sequence leaves a run in its middle, the run is cut in two as soon as somebody holds the upper piece alone;
whoever held the run holds both. A name may be in two runs, if it was computed twice and the first was out of sight: the
one that is entered first is used, the other ages, or loses its names when both would begin with the same.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import takewhile

from bulletserve.core.errors import EngineError


class Run:
    """Blocks `start:end` of every sequence that holds it, and of `upper`, the piece it was cut off from.

    No names: given up or forgotten. `grows`: nobody but its maker ever held it, so the maker may add to it.
    """

    __slots__ = ("blocks", "grows", "holders", "names", "start", "upper")

    def __init__(self, start: int, names: list[bytes], blocks: list[int], holders: int, *, grows: bool) -> None:
        self.start = start
        self.names = names
        self.blocks = blocks
        self.holders = holders
        self.grows = grows
        self.upper: Run | None = None

    @property
    def end(self) -> int:
        """Blocks of a sequence that ends with this run."""
        return self.start + len(self.blocks)

    def pieces(self) -> Iterator["Run"]:
        """The run and all that it was cut off from, upwards: whoever holds it holds them."""
        piece: Run | None = self
        while piece is not None:
            yield piece
            piece = piece.upper

    def agrees(self, names: list[bytes], at: int, end: int) -> int:
        """How many of a sequence's names from `at` on, up to `end`, are this run's at the same places."""
        if not self.start <= at < self.end:
            return 0
        own = self.names[at - self.start : end - self.start]
        wanted = names[at : at + len(own)]
        if own == wanted:
            return len(own)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, wanted, strict=True)))


class PrefixRuns:
    """All runs by the name of their first block; `idle_blocks` counts the blocks of those that nobody holds.

    `spare`: blocks that nobody holds and that lost their names to twins, for the ledger to take.
    """

    def __init__(self) -> None:
        self.idle_blocks = 0
        self.spare: list[int] = []
        self._run_at: dict[bytes, Run] = {}
        self._idle: OrderedDict[Run, None] = OrderedDict()

    def match(self, names: list[bytes]) -> tuple[list[tuple[Run, int]], int]:
        """The runs with the longest known beginning of a sequence, how many blocks of each, and how many in all."""
        found: list[tuple[Run, int]] = []
        known, end = 0, len(names)
        while known < end and (run := self._run_at.get(names[known])) is not None:
            same = run.agrees(names, known, end)
            found.append((run, same))
            known += same
        return found, known

    def use(self, found: list[tuple[Run, int]]) -> None:
        """What `match` returned is given up last, its end first."""
        for run, _ in reversed(found):
            if run in self._idle:
                self._idle.move_to_end(run)

    def follow(self, run: Run | None, names: list[bytes], at: int, end: int) -> tuple[Run | None, int]:
        """How far names `at:end` of a sequence that stands in `run` are known, and the run where it stands then."""
        while at < end:
            inside = run if run is not None and at < run.end else None
            same = max(piece.agrees(names, at, end) for piece in inside.pieces()) if inside else 0
            if not same:
                run = self._run_at.get(names[at])
                if run is None:
                    break
                same = run.agrees(names, at, end)
            at += same
        return run, at

    def hold(self, found: list[tuple[Run, int]]) -> list[Run]:
        """One more holder for what `match` returned. Returns the runs, each with its pieces, cut to what was found."""
        runs: list[Run] = []
        for run, blocks in found:
            if blocks < len(run.blocks):
                run = self._cut(run, blocks)
            if not run.holders:
                self._idle.pop(run, None)
                self.idle_blocks -= len(run.blocks)
            run.holders += 1
            run.grows = False
            if runs and run.upper is runs[-1]:
                runs[-1] = run
            else:
                runs.append(run)
        return runs

    def name(self, tip: Run | None, names: list[bytes], blocks: list[int], at: int) -> Run:
        """Name a sequence's blocks from `at` on, the first of which nobody has; a growing `tip` takes them in."""
        if tip is not None and tip.grows and tip.names and tip.end == at:
            tip.names += names
            tip.blocks += blocks
            return tip
        run = self._run_at[names[0]] = Run(at, names, blocks, holders=1, grows=True)
        return run

    def let_go(self, runs: Iterable[Run]) -> list[int]:
        """One holder less for a sequence's runs. Returns blocks of forgotten ones that nobody holds any more."""
        nameless: list[int] = []
        for run in reversed(list(runs)):
            for piece in run.pieces():
                piece.holders -= 1
                if piece.holders:
                    continue
                if piece.names:
                    self._idle[piece] = None
                    self.idle_blocks += len(piece.blocks)
                else:
                    nameless += piece.blocks
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
                run.names = []
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
        if any(key != run.names[0] for key, run in self._run_at.items()):
            raise EngineError("a run is not found by its first name")
        if any(len(run.names) != len(run.blocks) for run in runs):
            raise EngineError("names and blocks disagree")
        if set(self._idle) != {run for run in runs if not run.holders}:
            raise EngineError("a run that somebody holds may be spent, or one that nobody holds may not")
        if self.idle_blocks != sum(len(run.blocks) for run in self._idle):
            raise EngineError("the count of cached blocks is wrong")
        return list(self._idle)

    def _cut(self, run: Run, blocks: int) -> Run:
        """Cut the first blocks off a run; returns them as its upper piece, held by the same, idle in no order yet."""
        upper = Run(run.start, run.names[:blocks], run.blocks[:blocks], run.holders, grows=False)
        upper.upper, run.upper = run.upper, upper
        run.start = upper.end
        del run.names[:blocks], run.blocks[:blocks]
        self._run_at[upper.names[0]] = upper
        if run.names[0] in self._run_at:  # computed twice
            run.names = []
            if not run.holders:
                del self._idle[run]
                self.idle_blocks -= len(run.blocks)
                self.spare += run.blocks
        else:
            self._run_at[run.names[0]] = run
        return upper
