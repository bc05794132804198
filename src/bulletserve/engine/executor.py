"""The executor on a CPU: two lanes over one model and one cache, sharing cores instead of SMs.

Knows nothing about why a step was chosen. One wide thread runs every step that may use all cores (prefill, mixed,
decode that has the machine to itself); the narrow one only ever decodes on its share. A step that asks for all
cores comes after everything queued on either lane, any other after its own lane only.
"""

import logging
import time
from collections.abc import Callable

from bulletserve.core.events import StepDone
from bulletserve.core.launch import Launch
from bulletserve.core.partition import Lattice
from bulletserve.core.plan import DecodeStep, Lane, lanes_of
from bulletserve.core.ports import Poster
from bulletserve.engine.drawn import Drawn
from bulletserve.engine.lanes import LaneThread, Task
from bulletserve.engine.seats import SeatTable
from bulletserve.engine.step_runner import StepRunner
from bulletserve.resources.cpu_threads import use_threads

_log = logging.getLogger(__name__)

BeforeStep = Callable[[Launch], None]


class CpuExecutor:
    """Carries out launches and posts their `StepDone` to `poster`.

    `before_step` runs on the lane's thread before each step: tests delay or fail steps with it.
    """

    def __init__(
        self,
        runner: StepRunner,
        seats: SeatTable,
        lattice: Lattice,
        poster: Poster,
        before_step: BeforeStep | None = None,
    ) -> None:
        self.lattice = lattice
        self.poster = poster
        self.before_step = before_step
        self._runner = runner
        self._seats = seats
        self._wide = LaneThread("wide-lane")
        self._narrow = LaneThread("narrow-lane")
        self._last: dict[Lane, Task] = {}

    def start(self, launch: Launch) -> None:
        """Queue a step on its lane's thread."""
        self._seats.prepare(launch)
        step = launch.step
        whole = step.sms == self.lattice.total_sms
        lanes = tuple(Lane) if whole else (launch.lane,)
        after = tuple(self._last[lane] for lane in lanes if lane in self._last)
        task = Task(lambda: self._run(launch), tuple(t for t in after if not t.ended.is_set()))
        for lane in lanes_of(step):
            self._last[lane] = task
        narrow = isinstance(step, DecodeStep) and not whole
        (self._narrow if narrow else self._wide).put(task)

    def close(self) -> None:
        """Finish the steps that run, drop the others, end both threads."""
        self._narrow.close()
        self._wide.close()

    def _run(self, launch: Launch) -> None:
        started_s = time.monotonic()
        drawn = Drawn()
        error = ""
        try:
            use_threads(launch.step.sms)
            if self.before_step is not None:
                self.before_step(launch)
            drawn = self._runner.run(launch)
        except Exception as failure:
            _log.exception("step %d failed", launch.step_id)
            error = f"the engine failed at this step: {failure}"
        told, of_prompts = drawn.told(), drawn.told_of_prompts()
        ended_s = time.monotonic()
        self.poster.post(
            StepDone(launch.step_id, drawn.token_ids(), started_s, ended_s, error, False, told, of_prompts)
        )
