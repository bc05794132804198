"""What a turn of the scheduler costs at 256 running and 256 waiting requests, with an executor that does nothing.

    python benchmarks/turn.py [--turns 4000] [--repeats 5]

One turn is all of `Loop.handle`: a step's tokens are taken in, a snapshot is made, the policy decides, its plan is
checked and launched, the outputs are told. `mixed`: requests come and go all the time, their rows begin cache blocks
at different steps. `in_step`: nobody comes or goes, all rows begin a block at the same step. The budget is 400
microseconds at the 99th percentile. A turn makes one decision, and after one that had something to do another follows
at once. So that these short turns flatter nobody, only turns that took in a step's end or made a plan are counted, and
`settled` is all turns from a step's end until the policy had nothing to add.

Times are CPU times of the loop's thread. Every run is made several times: `all` is over all turns, `quiet` counts a
turn's least time, which takes out what else the machine does. `gc_frozen`: everything made before the run is exempt
from garbage collection, as in the engine process; `gc_off`: there is none.
"""

import argparse
import gc
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, product
from typing import NamedTuple

from bulletserve.core.events import Arrived, Event, Output, Status, StepDone
from bulletserve.core.launch import Launch
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import Lane, MixedStep, PrefillGroup
from bulletserve.core.prefix import block_hashes
from bulletserve.core.request import Request
from bulletserve.core.slo import Slo
from bulletserve.core.snapshot import Limits
from bulletserve.estimator.estimator import Estimator
from bulletserve.scheduler.engine_view import snapshot_of
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.loop import Loop
from bulletserve.scheduler.policies import POLICIES, make_policy
from bulletserve.scheduler.state import State
from bulletserve.simulation import open_calibration
from bulletserve.telemetry.latency import quantile
from record import record

BUDGET_US = 400
RUNNING = WAITING = 256
LIMITS = Limits(
    num_layers=32,
    block_size=16,
    total_blocks=40_000,
    max_seqs=RUNNING,
    group_token_layers=11_000,
    batch_tokens=2048,
    lattice=Lattice.of_splits(132, tuple(Partition(132 - sms, sms) for sms in (16, 32, 48, 64, 84, 100))),
)
SLOS = (Slo("chat", 0.3, 0.02), Slo("batch"))
PREFILL_S, DECODE_S = 0.002, 0.011


class NoDevice:
    """Clock, inbox, executor and outlet of a loop; a step costs nothing and ends in the order of its lane."""

    lattice = LIMITS.lattice

    def __init__(self) -> None:
        self._now_s = 0.0
        self._lane_free_s = dict.fromkeys(Lane, 0.0)
        self._ends: list[tuple[float, int, Launch]] = []
        self.finished = 0

    def now_s(self) -> float:
        """Seconds on a made-up clock."""
        return self._now_s

    def start(self, launch: Launch) -> None:
        """Note when it will end."""
        lanes = tuple(Lane) if isinstance(launch.step, MixedStep) else (launch.lane,)
        seconds = PREFILL_S if isinstance(launch.step, PrefillGroup) else DECODE_S
        end_s = max(self._now_s, *(self._lane_free_s[lane] for lane in lanes)) + seconds
        self._lane_free_s |= dict.fromkeys(lanes, end_s)
        heappush(self._ends, (end_s, launch.step_id, launch))

    def wait(self, deadline_s: float) -> Sequence[Event]:
        """The next step that ends."""
        if not self._ends:
            return ()
        self._now_s, step_id, launch = heappop(self._ends)
        step = launch.step
        samples = not isinstance(step, PrefillGroup) or step.layer_range[1] == LIMITS.num_layers
        drawn = sum(part.samples for part in launch.parts) * samples + len(launch.rows)
        return (StepDone(step_id, (7,) * drawn, self._now_s - 0.005, self._now_s),)

    def close(self) -> None:
        """Nothing to end."""

    def emit(self, output: Output) -> None:
        """Count the ends."""
        self.finished += len(output.finished)

    def report(self, status: Status) -> None:
        """Ignore it."""


def forecasts() -> Estimator:
    """An estimator ready for traffic, as an engine has it on an H200."""
    estimator = open_calibration("nvidia-h200")
    estimator.prepare(LIMITS.lattice, LIMITS.max_seqs, LIMITS.batch_tokens)
    return estimator


def mixed_requests() -> Iterator[Request]:
    """Lengths at random, so that rows fill blocks and end at different times."""
    rng = random.Random(1)
    for i in range(1_000_000):
        yield request(i, rng.randint(100, 900), rng.randint(50, 350))


def in_step_requests() -> Iterator[Request]:
    """All alike and without an end: every row begins a block at the same step."""
    for i in range(1_000_000):
        yield request(i, 64, 100_000)


def request(number: int, prompt_tokens: int, output_tokens: int) -> Request:
    """One request with a prompt of its own."""
    prompt = array("q", range(number, number + prompt_tokens))  # as the transport hands it on
    return Request(
        number,
        prompt,
        output_tokens,
        0.0,
        stop_ids=frozenset({2}),
        slo=SLOS[number % len(SLOS)],
        block_hashes=block_hashes(prompt, LIMITS.block_size),
    )


LOADS = {"mixed": mixed_requests, "in_step": in_step_requests}


class Took(NamedTuple):
    """One turn: its microseconds; whether it began with a step's end; whether it counts."""

    us: float
    begins: bool
    counts: bool


def turn_times(policy: str, requests: Iterator[Request], turns: int) -> list[Took]:
    """`turns` turns, once the engine is full."""
    device = NoDevice()
    made = make_policy(policy)
    ledger = KvLedger(LIMITS.total_blocks + 1, LIMITS.block_size)
    state = State(LIMITS, ledger, made.rules, forecasts())
    loop = Loop(state, made, device, device, device, device)
    loop.handle([Arrived(next(requests)) for _ in range(RUNNING + WAITING)])
    times: list[Took] = []
    told = 0
    full = False
    while len(times) < turns or loop.unsettled:
        begins = not loop.unsettled
        events: list[Event] = []
        if begins:
            events = [*device.wait(0.0), *(Arrived(next(requests)) for _ in range(device.finished - told))]
            told = device.finished
        began_ns = time.thread_time_ns()
        loop.handle(events)
        took_us = (time.thread_time_ns() - began_ns) / 1e3
        full = full or (begins and snapshot_of(state, 0.0).decode_rows > 0.9 * RUNNING)
        if full:
            times.append(Took(took_us, begins, begins or loop.unsettled))
    return times


def settled_us(times: Sequence[Took]) -> list[float]:
    """From each step's end until nothing was to be added."""
    sums: list[float] = []
    for took in times:
        if took.begins:
            sums.append(0.0)
        sums[-1] += took.us
    return sums


def main() -> None:
    """Run all policies, print the figures and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    metrics: dict[str, float] = {}
    for collector in ("on", "frozen", "off"):
        gc.collect()
        if collector != "on":
            gc.freeze()
        if collector == "off":
            gc.disable()
        for policy, (kind, make) in product(POLICIES, LOADS.items()):
            runs = [turn_times(policy, make(), options.turns) for _ in range(options.repeats)]
            name = f"turn_{policy}_{kind}_gc_{collector}"
            quiet = [min(took) for took in zip(*runs, strict=True)]
            kinds = {
                "quiet": [took.us for took in quiet if took.counts],
                "all": [took.us for took in chain(*runs) if took.counts],
                "settled_quiet": settled_us(quiet),
            }
            for (what, times_us), q in product(kinds.items(), (50, 99)):
                metrics[f"{name}_{what}_p{q}_us"] = round(quantile(times_us, q / 100), 1)
            figures = "  ".join(f"{key.removeprefix(name)[1:-3]} {metrics[key]:6.0f}" for key in metrics if name in key)
            print(f"{name:44} {figures} us", flush=True)
    print("wrote", record("turn", metrics))


if __name__ == "__main__":
    main()
