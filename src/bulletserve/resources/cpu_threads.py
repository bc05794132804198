"""CPU threads as a partition: how many threads of a torch operation each lane may use.

Knows nothing about steps. A lane is one Python thread; torch splits its operations over a team of OpenMP threads
whose size is a property of the calling thread. Setting it costs about 0.15 microseconds. A second large team in one
process slows both, so exactly one lane thread (the wide one) ever uses all cores, and the main thread is set to one.
"""

import os
import threading

import torch

from bulletserve.core.partition import Lattice, Partition

_current = threading.local()


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_lattice(cores: int) -> Lattice:
    """Every split of the cores into two shares; on one core, lanes that share it."""
    if cores == 1:
        return Lattice.of_splits(1, (Partition(1, 1),))
    return Lattice.of_splits(cores, tuple(Partition(cores - n, n) for n in range(1, cores)))


def use_threads(count: int) -> None:
    """Let torch operations of the calling thread use `count` threads from now on."""
    if getattr(_current, "count", None) != count:
        torch.set_num_threads(count)
        _current.count = count
