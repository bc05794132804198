"""The executor on a GPU: two lanes over one model and one cache, each step on the SMs that its plan gave it.

Knows nothing about why a step was chosen. A step that asks for the whole device comes after everything queued on
either lane, any other after its own lane only; both by events between streams, never by waiting on the host.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from bulletserve.core.launch import Launch
from bulletserve.core.partition import Lattice
from bulletserve.core.plan import Lane, comes_after_both, lanes_of
from bulletserve.core.ports import Poster
from bulletserve.engine.cuda.batch_steps import BatchSteps
from bulletserve.engine.cuda.decode_steps import DecodeSteps
from bulletserve.engine.cuda.lane import GpuLane, GpuTask, Run
from bulletserve.engine.cuda.seat_tables import CudaSeats, SeatUpdate
from bulletserve.engine.drawn import Drawn
from bulletserve.engine.kv_cache import KvCache
from bulletserve.resources.manager import PartitionManager

_log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 2e-4
"""How long Python lets one lane launch before another thread may: the default of 5 ms would hold decode up."""

BeforeStep = Callable[[Launch], None]


class LaneSteps(Protocol):
    """What queues one lane's steps on the current stream."""

    def run(self, launch: Launch, update: SeatUpdate | None) -> Drawn:
        """Queue a step; what it draws will lie on the host."""

    def give_up(self, launch: Launch, update: SeatUpdate | None) -> None:
        """A step failed, perhaps before it began: see to the tables, because the next may hold its rows, void.

        They write a key and a value at their length all the same. So each needs its newest block, or that place would
        be in whatever block the seat's last guest had there, and a length behind all that has a name: a named block may
        be others' too.
        """


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
        self.batch, self.decode = batch, decode
        steps: dict[Lane, LaneSteps] = {Lane.PREFILL: batch, Lane.DECODE: decode}
        self._lanes = {lane: GpuLane(f"{lane}-lane", device, self._guarded(s), poster) for lane, s in steps.items()}
        self._last: dict[Lane, GpuTask] = {}
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._switch_interval_s))

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
        lanes = tuple(Lane) if comes_after_both(step, self.lattice) else (launch.lane,)
        after = tuple(self._last[lane] for lane in lanes if lane in self._last and not self._last[lane].ended.is_set())
        stream = self._manager.stream(launch.lane, step.sms)
        task = GpuTask(launch, stream, after, self._seats.prepare(launch))
        for lane in lanes_of(step):
            self._last[lane] = task
        self._lanes[launch.lane].put(task)

    def close(self) -> None:
        """Finish the steps that run, drop the others, end the threads, give back streams and memory.

        May be called again. The process may live on and load another model, so nothing stays behind: neither how often
        Python changes threads nor, as long as somebody keeps this object, what lies on the GPU.
        """
        if not self._lanes:
            return
        for lane in self._lanes.values():
            lane.close()
        sys.setswitchinterval(self._switch_interval_s)
        try:
            self._manager.close()
        except Exception as failure:  # a device that has failed: whoever used it has been told
            _log.warning("the GPU could not be waited for: %s", failure)
        self._lanes, self._last = {}, {}
        del self.cache, self.batch, self.decode, self._seats
        torch.cuda.empty_cache()

    def _guarded(self, steps: LaneSteps) -> Run:
        def run(launch: Launch, prepared: Any) -> Drawn:
            try:
                if self.before_step is not None:
                    self.before_step(launch)
                return steps.run(launch, prepared)
            except Exception:
                steps.give_up(launch, prepared)
                raise

        return run
