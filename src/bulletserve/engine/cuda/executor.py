"""The executor on a GPU: two lanes over one model and one cache, each step on the SMs that its plan gave it.

Knows nothing about why a step was chosen. A step that asks for the whole device comes after everything queued on
either lane, any other after its own lane only; both by events between streams, never by waiting on the host.
"""

from collections.abc import Callable
from typing import Any

import torch

from bulletserve.core.launch import Launch
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import Lane, MixedStep, lanes_of
from bulletserve.core.ports import Poster
from bulletserve.engine.cuda.batch_steps import BatchSteps
from bulletserve.engine.cuda.decode_steps import DecodeSteps
from bulletserve.engine.cuda.lane import GpuLane, GpuTask, Run
from bulletserve.engine.cuda.seat_tables import CudaSeats
from bulletserve.engine.kv_cache import KvCache
from bulletserve.resources.manager import PartitionManager

BeforeStep = Callable[[Launch], None]


class CudaExecutor:
    """Carries out launches and posts their `StepDone` to `poster`.

    `batch` and `decode` queue the work of the prefill lane's and the decode lane's steps. `before_step` runs in a
    lane's launching thread, with the step's stream current, before each step: tests delay or fail steps with it.
    """

    def __init__(
        self,
        manager: PartitionManager,
        cache: KvCache,
        seats: CudaSeats,
        batch: BatchSteps,
        decode: DecodeSteps,
        device: torch.device,
        poster: Poster,
    ) -> None:
        self.lattice: Lattice = manager.lattice
        self.cache = cache
        self.before_step: BeforeStep | None = None
        self._manager = manager
        self._seats = seats
        # Where streams only have priorities, both lanes' share is the whole device: they still run side by side.
        self._one_share = Partition(self.lattice.total_sms, self.lattice.total_sms) in self.lattice.partitions
        self.batch, self.decode = batch, decode
        runs: dict[Lane, Run] = {Lane.PREFILL: batch.run, Lane.DECODE: decode.run}
        self._lanes = {lane: GpuLane(f"{lane}-lane", device, self._hooked(run), poster) for lane, run in runs.items()}
        self._last: dict[Lane, GpuTask] = {}

    @property
    def poster(self) -> Poster:
        """Where ends of steps are posted."""
        return self._lanes[Lane.DECODE].poster

    @poster.setter
    def poster(self, poster: Poster) -> None:
        for lane in self._lanes.values():
            lane.poster = poster

    def observe(self, observer: Callable[[GpuTask], None] | None) -> None:
        """Let `observer` hear of every step that ended, in the awaiting thread of its lane."""
        for lane in self._lanes.values():
            lane.observe = observer

    def start(self, launch: Launch) -> None:
        """Queue a step on its lane."""
        step = launch.step
        whole = step.sms == self.lattice.total_sms and (isinstance(step, MixedStep) or not self._one_share)
        lanes = tuple(Lane) if whole else (launch.lane,)
        after = tuple(self._last[lane] for lane in lanes if lane in self._last and not self._last[lane].ended)
        stream = self._manager.stream(launch.lane, step.sms)
        task = GpuTask(launch, stream, after, self._seats.prepare(launch))
        for lane in lanes_of(step):
            self._last[lane] = task
        self._lanes[launch.lane].put(task)

    def close(self) -> None:
        """Finish the steps that run, drop the others, end the threads, give the streams back."""
        for lane in self._lanes.values():
            lane.close()
        self._manager.close()

    def _hooked(self, run: Run) -> Run:
        def hooked(launch: Launch, prepared: Any) -> torch.Tensor | None:
            if self.before_step is not None:
                self.before_step(launch)
            return run(launch, prepared)

        return hooked
