"""How much of the processors other programs took while a run was measured: the sign that its figures are not its own.

Knows nothing about runs. The system counts the processor time of all programs, and what a virtual machine's host took
away; ours is subtracted. What runs on cores that the engine leaves free disturbs nobody and is none of it.
"""

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

STAT = Path("/proc/stat")
TOO_MUCH = 0.1
"""Of the engine's cores: from here on figures of a run are not to be trusted."""

LEAST_S = 1.0
"""The system counts in hundredths of a second: of a shorter time nothing is said."""

_IDLE = (3, 4)  # idle, and waiting for a disk
_STATES = 8  # the two that follow are counted among these


class OtherPrograms:
    """Watches for as long as it is entered. `taken_x`: the least share of `cores` cores, those that the engine uses at
    once, that others must have had in the mean; nan where that cannot be told."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self.taken_x = float("nan")

    def __enter__(self) -> Self:
        self._began_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall_s = time.monotonic() - self._began_s
        if wall_s < LEAST_S:
            return
        others = (_busy_s() - self._busy_s - (time.process_time() - self._own_s)) / wall_s
        free = max(0, (os.cpu_count() or 1) - self._cores)
        self.taken_x = min(1.0, max(0.0, others - free) / self._cores) if others == others else others


def _busy_s() -> float:
    """Processor seconds of all programs since the system began; nan where it does not say."""
    try:
        counts = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1 : _STATES + 1]]
        if len(counts) < _STATES or not sum(counts):
            return float("nan")
        return sum(count for at, count in enumerate(counts) if at not in _IDLE) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return float("nan")
