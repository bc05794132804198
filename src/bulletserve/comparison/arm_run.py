"""One run of one arm: a policy serves a list of prompts on an engine that is loaded already.

Knows nothing about files or tables. Answers are greedy and forced to their length, so that arms do the same work. Every
run has a cache of its own, empty at first. Figures are those of a window: from the first arrival to the end of the last
scored answer, whether or not the run goes on until all have ended (a record wants that, goodput does not). The garbage
collector is frozen meanwhile, as it is in the process that serves.
"""

import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from bulletserve.comparison.other_programs import OtherPrograms
from bulletserve.compose import Engine
from bulletserve.core.errors import EngineError, PolicyError
from bulletserve.core.events import Arrived, Event
from bulletserve.core.garbage import kept_garbage
from bulletserve.core.ports import Poster
from bulletserve.core.prefix import block_hashes
from bulletserve.core.request import FinishReason, Request
from bulletserve.core.slo import Slo
from bulletserve.engine.load import choose_device
from bulletserve.profiling.meter import Meter, Watch
from bulletserve.scheduler.loop import Loop, both
from bulletserve.scheduler.policies import make_policy
from bulletserve.telemetry.collector import Collector
from bulletserve.telemetry.latency import Answer
from bulletserve.telemetry.recorder import Recorder
from bulletserve.telemetry.timeline import StepSpan, Timeline

_LEAD_S = 0.05  # from when all is ready to the moment that counts as the list's start
_LOOK_S = 0.05  # at the energy counter: it need not be found to the millisecond, and the loop wants the GIL
_DRAIN_S = 60.0
_HOST_CORES = 2  # that an engine on a GPU needs: the loop and whoever launches

Record = Callable[[Loop], Recorder | None]
"""Makes what writes a run down; None where that cannot be."""


class OutOfTime(Exception):
    """The time that was given is over, or would be before a run had ended."""


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """Prompt ids that arrive `arrival_s` after the start and are answered with exactly `output_tokens` tokens."""

    arrival_s: float
    prompt_ids: Sequence[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One run, as it was when its window ended. Times in seconds of the monotonic clock.

    `answers`: one for each prompt; what came after the window is left out. `start_s`: the start of the list. `spans`:
    every step, those after the window too. `both_lanes_s`: how long both lanes ran. `forecast_errors`: by kind of step.
    `watts`, `mhz`: nan without a meter. `record_broke`: why the record of it is not whole, "" if it is or none was
    wanted. `others_x`: as `OtherPrograms.taken_x`.
    """

    policy: str
    answers: Sequence[Answer]
    start_s: float
    end_s: float
    spans: Sequence[StepSpan]
    both_lanes_s: float
    preemptions: int
    forecast_errors: Mapping[str, float]
    watts: float = float("nan")
    mhz: float = float("nan")
    record_broke: str = ""
    others_x: float = float("nan")

    @property
    def first_s(self) -> float:
        """The first arrival."""
        return min(answer.arrival_s for answer in self.answers)


def run_arm(
    engine: Engine,
    policy: str,
    prompts: Sequence[TimedPrompt],
    slo: Slo | None = None,
    *,
    scored: range | None = None,
    record: Record | None = None,
    meter: Meter | None = None,
    until_s: float = inf,
) -> ArmRun:
    """Serve the prompts once. `scored`: which of them end the window, all by default; without a `record` the run ends
    with it too.

    Raises `OutOfTime` at `until_s` (monotonic), `PolicyError`, and `EngineError` for a request that failed, a fault or
    blocks that are lost. After any but a fault the engine is ready for another run.
    """
    collector, timeline = Collector(), Timeline()
    loop = engine.loop(collector, make_policy(policy), timeline)
    recorder = None if record is None else record(loop)
    loop.observer = both(timeline, recorder)
    requests = _requests(engine, prompts, slo or Slo())
    power = Watch(meter, _LOOK_S)
    on_cpu = choose_device(engine.config.device) == "cpu"
    others = OtherPrograms(engine.limits.lattice.total_sms if on_cpu else _HOST_CORES)
    try:
        with kept_garbage(), power, others:
            start_s = time.monotonic() + _LEAD_S
            timed = [replace(one, arrival_s=start_s + one.arrival_s) for one in requests]
            for request in timed:
                collector.expect(request)
            feeder = _Feeder(engine.inbox, timed)
            try:
                _serve(loop, collector, range(len(timed)) if scored is None else scored, until_s)
                power.until_s = end_s = time.monotonic()
                state = loop.state
                both_lanes_s, preemptions = state.lanes.both_busy_s, state.preemptions
                errors = {str(kind): error for kind, error in (state.watch.mean_errors if state.watch else {}).items()}
                if recorder is not None:
                    _serve(loop, collector, range(len(timed)), until_s)
                    while not state.is_idle:
                        loop.turn()
            finally:
                feeder.stop()
                _clear(engine, loop)
    finally:
        if recorder is not None:
            recorder.close()
    return ArmRun(
        policy,
        [_until(collector.answers[number], end_s) for number in range(len(timed))],
        start_s,
        end_s,
        timeline.spans,
        both_lanes_s,
        preemptions,
        errors,
        power.watts,
        power.mhz,
        "" if recorder is None else recorder.stopped,
        others.taken_x,
    )


def _requests(engine: Engine, prompts: Sequence[TimedPrompt], slo: Slo) -> list[Request]:
    """Numbered from 0; arrivals count from the start."""
    size = engine.limits.block_size
    caching = engine.config.enable_prefix_caching
    return [
        Request(
            number,
            array("q", one.prompt_ids),
            one.output_tokens,
            one.arrival_s,
            slo=slo,
            block_hashes=block_hashes(one.prompt_ids, size) if caching else (),
        )
        for number, one in enumerate(prompts)
    ]


def _serve(loop: Loop, collector: Collector, waited_for: range, until_s: float) -> None:
    """Turn until these requests have ended."""
    numbers = iter(waited_for)
    number = next(numbers, None)
    while number is not None:
        loop.turn()
        if loop.state.fault:
            raise EngineError(loop.state.fault)
        if loop.stalled:
            raise PolicyError(loop.stalled)
        while number is not None and collector.answers[number].finish:
            number = next(numbers, None)
        if time.monotonic() > until_s:
            raise OutOfTime
    for number, message in collector.messages.items():
        if collector.answers[number].finish is FinishReason.ERROR:
            raise EngineError(message)


def _clear(engine: Engine, loop: Loop) -> None:
    """End what is open and wait for the steps under way, so that the next run finds idle lanes and all blocks."""
    state, until_s = loop.state, time.monotonic() + _DRAIN_S
    events: Sequence[Event] = loop.unheard()
    while not state.fault:
        for event in events:
            if not isinstance(event, Arrived):  # nobody waits for those, and to queue them may be what failed
                state.apply(event, time.monotonic())
        state.fail_all("the run is over")
        if state.is_idle:
            state.ledger.check_integrity()
            if state.ledger.used_blocks:
                raise EngineError(f"{state.ledger.used_blocks} blocks are still held after a run of {loop.policy.name}")
            return
        if time.monotonic() > until_s:
            raise EngineError(f"steps of {loop.policy.name} have not ended {_DRAIN_S:.0f} s after its run")
        events = engine.inbox.wait(until_s)


class _Feeder:
    """Posts each request when it is due, from a thread of its own."""

    def __init__(self, inbox: Poster, requests: Sequence[Request]) -> None:
        self._inbox, self._requests = inbox, sorted(requests, key=lambda one: one.arrival_s)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._feed, name="feeder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Post nothing more."""
        self._stopped.set()
        self._thread.join()

    def _feed(self) -> None:
        for request in self._requests:
            if self._stopped.wait(max(0.0, request.arrival_s - time.monotonic())):
                return
            self._inbox.post(Arrived(request))


def _until(answer: Answer, end_s: float) -> Answer:
    """An answer as it was at a moment."""
    told = bisect_right(answer.token_times_s, end_s)
    if told == len(answer.token_times_s):
        return answer
    return replace(answer, token_times_s=answer.token_times_s[:told], tokens=answer.tokens[:told], finish="")
