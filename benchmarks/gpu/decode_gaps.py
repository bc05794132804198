"""GPU idle between consecutive decode steps while an eager prefill runs beside, also with Python working meanwhile.

    python -m benchmarks.gpu.decode_gaps

A gap lies between the device's end of one step and its start of the next; the target is a p99 of 3 % of the step. A
step that is launched late begins (for the device's clock) before its kernels are there, so the share of late launches
and the spread of the steps' durations stand beside the gaps. `busy`: another thread computes 1 ms in Python at each
decode step, as a scheduler might.
"""

import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Report

from bulletserve.core.partition import Partition
from bulletserve.core.plan import Lane
from bulletserve.profiling.sources import Source
from bulletserve.telemetry.latency import quantile

ROWS, CONTEXT = 32, 2048
PROMPTS = (2048, 8192)
SPLITS = (Partition(100, 32), Partition(68, 64))
BURDEN_S = 1e-3


def add_options(parser: ArgumentParser) -> None:
    """None."""


def run(bench: Bench, report: Report) -> None:
    """Measure and print."""
    report.line("decode gaps", *("step ms", "p50", "p99", "max ms", "p99 %", "step p99", "late %"))
    for split in SPLITS:
        if split not in bench.executor.lattice.partitions:
            report.line(f"{split.prefill_sms}+{split.decode_sms}: not granted")
            continue
        for tokens in PROMPTS:
            for busy in (False, True):
                _cell(bench, report, split, tokens, busy)


def _cell(bench: Bench, report: Report, split: Partition, tokens: int, busy: bool) -> None:
    pool = bench.pool()
    decode = bench.decode(ROWS, CONTEXT, split.decode_sms, pool)
    prompts = bench.prompts(tokens, split.prefill_sms, pool, first_seat=ROWS)
    with burden() as work:
        found = bench.driver.run(decode, prompts, seconds=2.0, on_step=work if busy else None).lanes[0]
    p50, p99 = (quantile(found.gaps_ms, q) for q in (0.5, 0.99))
    share = 100 * p99 / found.median_ms
    step_p99 = quantile(found.step_ms, 0.99)
    name = f"gap_d{split.decode_sms}_p{split.prefill_sms}_{tokens}{'_busy' if busy else ''}"
    report.add(
        **{
            f"{name}_step_ms": found.median_ms,
            f"{name}_p50_ms": p50,
            f"{name}_p99_ms": p99,
            f"{name}_max_ms": max(found.gaps_ms),
            f"{name}_p99_pct": share,
            f"{name}_step_p99_ms": step_p99,
            f"{name}_late_pct": 100 * found.late,
        }
    )
    label = f"{split.prefill_sms}+{split.decode_sms} {tokens}{' busy' if busy else ''}"
    report.line(label, found.median_ms, p50, p99, max(found.gaps_ms), share, step_p99, 100 * found.late)


@contextmanager
def burden() -> Iterator[Callable[[Source], None]]:
    """A thread that computes in Python for `BURDEN_S` whenever a decode step is told to have ended."""
    wanted = threading.Semaphore(0)
    over = False

    def work() -> None:
        while True:
            wanted.acquire()
            if over:
                return
            until_s = time.perf_counter() + BURDEN_S
            while time.perf_counter() < until_s:
                sum(range(100))

    def told(source: Source) -> None:
        if source.lane is Lane.DECODE:
            wanted.release()

    thread = threading.Thread(target=work, name="burden", daemon=True)
    thread.start()
    try:
        yield told
    finally:
        over = True
        wanted.release()
        thread.join()


if __name__ == "__main__":
    from benchmarks.gpu.all import main

    main("decode_gaps")
