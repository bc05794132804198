"""An engine that is ready to run steps, as `compose` gets it: on whatever device.

Knows nothing about policies.
"""

from dataclasses import dataclass
from typing import Protocol

from bulletserve.core.launch import Launch
from bulletserve.core.partition import Lattice
from bulletserve.core.ports import Poster
from bulletserve.engine.cache_size import CacheSize


class DeviceExecutor(Protocol):
    """An `Executor` whose ends of steps can be sent to another inbox."""

    poster: Poster

    @property
    def lattice(self) -> Lattice:
        """The partitions it really grants."""

    def start(self, launch: Launch) -> None:
        """Queue a step on its lane."""

    def close(self) -> None:
        """Finish what runs, drop the rest, end the lanes."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """`executor` and what `Limits` and `EngineInfo` want to know about the device.

    `captured_rows`: a step of the prefill lane of up to so many rows, or any on a CPU, costs the host no time worth
    telling; the kernels of larger ones are launched one by one. `graph_tokens`: prefill batches up to so many run all
    layers as one group (0: none do). `device` and `notes` are for people.
    """

    executor: DeviceExecutor
    size: CacheSize
    device: str
    dtype: str
    group_token_layers: int
    batch_tokens: int
    captured_rows: int
    graph_tokens: int = 0
    notes: tuple[str, ...] = ()
