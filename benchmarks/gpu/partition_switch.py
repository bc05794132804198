"""What taking another partition costs the host, as a lane does it, with small kernels in flight on both lanes.

    python -m benchmarks.gpu.partition_switch [--switches 20000]

Before a step a lane looks its stream up, makes it wait for the step before if that ran on another stream, and makes it
current; after the step it records an event. `switch` is all of that, `stay` the same where the share is the old one;
launching the kernel is not part of either. A lane's next share is drawn at random. The budget is 10 microseconds at
the 99th percentile. Also: how long building all partitions takes at start, and how much GPU memory they hold.

Garbage collection is off, as in the engine process under traffic.
"""

import gc
import random
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

import torch
from benchmarks.gpu.report import Report

from bulletserve.core.plan import Lane
from bulletserve.resources.manager import PartitionManager
from bulletserve.telemetry.latency import quantile

WARM_UP = 500
BUDGET_US = 10
IN_FLIGHT = 64


@dataclass
class LaneOfWork:
    """One lane: its stream, the event after its last step, and what its kernels work on."""

    stream: torch.cuda.Stream
    last: torch.cuda.Event
    numbers: torch.Tensor


def switch_times_us(manager: PartitionManager, switches: int) -> dict[str, list[float]]:
    """Microseconds of host time of each switch, and of each step that keeps its stream."""
    rng = random.Random(1)
    lattice = manager.lattice
    shares = {Lane.PREFILL: sorted(lattice.prefill_shares), Lane.DECODE: sorted(lattice.decode_shares)}
    lanes = {
        lane: LaneOfWork(
            manager.stream(lane, lattice.total_sms),
            torch.cuda.Event(),  # type: ignore[no-untyped-call]
            torch.ones(4096, device=manager.device),
        )
        for lane in Lane
    }
    times_us: dict[str, list[float]] = {"switch": [], "stay": []}
    steps = 0
    torch.cuda.synchronize()
    while len(times_us["switch"]) < switches:
        lane = rng.choice(tuple(Lane))
        sms = rng.choice(shares[lane])
        work = lanes[lane]
        began_ns = time.perf_counter_ns()
        stream = manager.stream(lane, sms)
        switched = stream is not work.stream
        if switched:
            stream.wait_event(work.last)
        torch.cuda.set_stream(stream)
        taken_ns = time.perf_counter_ns()
        work.numbers.add_(1.0)
        launched_ns = time.perf_counter_ns()
        work.last.record(stream)
        ended_ns = time.perf_counter_ns()
        work.stream = stream
        steps += 1
        if steps > WARM_UP:
            times_us["switch" if switched else "stay"].append((taken_ns - began_ns + ended_ns - launched_ns) / 1e3)
        if steps % IN_FLIGHT == 0:
            torch.cuda.synchronize()  # else the launch queue fills, and every call waits for the GPU
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.default_stream(manager.device))
    expected = 2.0 + steps
    if sum(work.numbers[0].item() for work in lanes.values()) != expected:
        raise SystemExit("steps ran out of order")
    return times_us


def add_options(parser: ArgumentParser) -> None:
    """Options of this script."""
    parser.add_argument("--switches", type=int, default=20_000, help="switches of partition_switch")


def run(options: Namespace, report: Report) -> None:
    """Build, switch, print and record; needs no engine."""
    torch.ones(1, device="cuda:0").add_(1.0).item()  # CUDA's own start is no part of it
    free_before, _ = torch.cuda.mem_get_info(0)
    began_s = time.perf_counter()
    manager = PartitionManager(0)
    built_s = time.perf_counter() - began_s
    report.add(
        partitions_build_ms=built_s * 1e3,
        partitions_memory_mib=(free_before - torch.cuda.mem_get_info(0)[0]) / 2**20,
    )
    gc.collect()
    gc.disable()
    try:
        for name, times_us in switch_times_us(manager, options.switches).items():
            report.add(**{f"partition_{name}_p{q}_us": quantile(times_us, q / 100) for q in (50, 99)})
            report.add(**{f"partition_{name}_max_us": max(times_us)})
    finally:
        gc.enable()
        manager.close()
    for key, value in report.metrics.items():
        report.line(f"{key:28}", value)
    report.line(f"budget of partition_switch_p99_us: {BUDGET_US}")


if __name__ == "__main__":
    from benchmarks.gpu.all import main

    main("partition_switch")
