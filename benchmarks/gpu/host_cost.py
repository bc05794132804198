"""What a decode step costs the host in the thread that launches it, at 1, 64 and 256 rows.

    python -m benchmarks.gpu.host_cost

`cpu`: CPU time of that thread per step, everything between two steps included. `wall`: time from the beginning to the
end of queueing a step's work, which also counts waiting for Python's lock. `start`: the scheduler thread's call.
Alone, and beside an eager prefill; the target is 400 microseconds at 256 rows beside it.
"""

import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Report

from bulletserve.core.launch import Launch
from bulletserve.core.partition import Partition
from bulletserve.core.plan import Lane
from bulletserve.engine.cuda.executor import CudaExecutor
from bulletserve.engine.drawn import Drawn
from bulletserve.telemetry.latency import quantile

ROWS = (1, 64, 256)
CONTEXT = 512
PROMPT_TOKENS = 2048
SPLIT = Partition(100, 32)


def add_options(parser: ArgumentParser) -> None:
    """None."""


def run(bench: Bench, report: Report) -> None:
    """Measure and print."""
    headings = ("wall p50", "wall p99", "cpu p50", "cpu p99", "start p50", "start p99")
    report.line("host, us", *headings)
    split = SPLIT if SPLIT in bench.executor.lattice.partitions else bench.executor.lattice.nearest_split(0.25)
    for rows in ROWS:
        for beside in (False, True):
            _cell(bench, report, rows, split, beside)


def _cell(bench: Bench, report: Report, rows: int, split: Partition, beside: bool) -> None:
    pool = bench.pool()
    sources: list[Any] = [bench.decode(rows, CONTEXT, split.decode_sms, pool)]
    if beside:
        sources.append(bench.prompts(PROMPT_TOKENS, split.prefill_sms, pool, first_seat=rows))
    with timed_launches(bench.executor) as times:
        found = bench.driver.run(*sources, seconds=1.2)
    plain = [(before, step) for before, step in pairwise(times) if not step.seats]
    wall_us = [step.wall_ns / 1e3 for _, step in plain]
    cpu_us = [(step.cpu_ns - before.cpu_ns) / 1e3 for before, step in plain]
    figures = {
        f"{what}_p{q}_us": quantile(values, q / 100)
        for what, values in (("wall", wall_us), ("cpu", cpu_us), ("start", found.start_us))
        for q in (50, 99)
    }
    name = f"host_{rows}_rows{'_beside_prefill' if beside else ''}"
    report.add(**{f"{name}_{figure}": value for figure, value in figures.items()})
    report.line(f"{rows} rows{' beside' if beside else ''}", *figures.values())


class LaunchTime(NamedTuple):
    """Queueing one step: wall time of it, CPU time of the thread so far, seats taken with it (not a usual step)."""

    wall_ns: int
    cpu_ns: int
    seats: int


@contextmanager
def timed_launches(executor: CudaExecutor) -> Iterator[list[LaunchTime]]:
    """Every decode step that is launched while this holds."""
    lane = executor._lanes[Lane.DECODE]
    inner = lane._run
    times: list[LaunchTime] = []

    def timed(launch: Launch, prepared: Any) -> Drawn:
        began_ns = time.perf_counter_ns()
        tokens = inner(launch, prepared)
        times.append(LaunchTime(time.perf_counter_ns() - began_ns, time.thread_time_ns(), len(launch.seats)))
        return tokens

    lane._run = timed
    try:
        yield times
    finally:
        lane._run = inner


if __name__ == "__main__":
    from benchmarks.gpu.all import main

    main("host_cost")
