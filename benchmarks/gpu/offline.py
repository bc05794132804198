"""Offline throughput: many requests at once through the real scheduler loop, for each policy.

    python -m benchmarks.gpu.offline [--workload FILE ...] [--requests 300] [--policy SPEC ...]

Prompts are random token ids, answers are greedy and end at the length that the list gives; the prefix cache is off.
Wall time is from the first arrival to the last token. `first 80`: requests per second until four fifths have ended;
the drain that follows has few left. `both lanes`: share of the wall time in which both lanes ran a step.
"""

import random
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.bench import MAX_ROWS, Bench
from benchmarks.gpu.report import Report

from bulletserve.core.events import Arrived
from bulletserve.core.ports import Outlet
from bulletserve.core.request import Request
from bulletserve.scheduler.inbox import MonotonicClock
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.loop import Loop
from bulletserve.scheduler.policies import make_policy
from bulletserve.scheduler.state import State
from bulletserve.telemetry.collector import Collector
from bulletserve.workload.request_list import RequestLengths, read_request_list

WORKLOADS = tuple(Path("../shared/workloads") / f"{name}.jsonl" for name in ("azure-code", "azure-conv", "arxiv-sum"))
POLICIES = ("chunked_prefill:budget=8192", "chunked_prefill:budget=2048", "bullet", "static_split", "time_sliced")
LEAST_RUN_S = 25.0
"""With less time left no run is begun, nor with less than 1.5 times what the workload took before."""


def add_options(parser: ArgumentParser) -> None:
    """Options of this script."""
    parser.add_argument("--workload", type=Path, nargs="+", default=WORKLOADS, help="request lists of offline")
    parser.add_argument("--requests", type=int, default=300, help="how many of each list offline serves")
    parser.add_argument("--policy", nargs="+", default=POLICIES, help="policies of offline, as name:option=value")


def run(bench: Bench, report: Report) -> None:
    """Measure and print."""
    options = bench.options
    names = ("req/s", "first 80", "out t/s", "all t/s", "wall s", "both %", "preempt")
    report.line(f"{'offline':42}", *names)
    for missing in (path for path in options.workload if not path.exists()):
        report.line(f"{missing} is not there")
    took_s: dict[Path, float] = {}
    for policy in options.policy:
        for path in filter(Path.exists, options.workload):
            began_s = time.monotonic()
            if bench.time_left_s < max(LEAST_RUN_S, 1.5 * took_s.get(path, 0.0)):
                report.line(f"{path.stem} {policy}", "no time left")
                continue
            lengths = read_request_list(path)[: options.requests]
            _serve(bench, report, path.stem, policy, lengths)
            took_s[path] = time.monotonic() - began_s


def _serve(bench: Bench, report: Report, workload: str, policy: str, lengths: Sequence[RequestLengths]) -> None:
    requests = random_requests(lengths, bench.shape.vocab_size)
    collector = Collector()
    loop = make_loop(bench, policy, collector)
    state = loop.state
    began_s = time.monotonic()
    for request in requests:
        collector.expect(request)
        bench.inbox.post(Arrived(request))
    while collector.open or not state.is_idle:
        loop.turn()
        if state.fault:
            raise RuntimeError(state.fault)
        if bench.time_left_s < 0:
            raise RuntimeError(f"{collector.open} of {len(requests)} requests are open and the time is over")
    if collector.messages:
        raise RuntimeError(f"{len(collector.messages)} requests failed: {next(iter(collector.messages.values()))}")
    answers = collector.answers.values()
    ends_s = sorted(answer.token_times_s[-1] - began_s for answer in answers)
    wall_s, most = ends_s[-1], max(1, len(ends_s) * 4 // 5)
    output = sum(len(answer.tokens) for answer in answers)
    figures = {
        "req_s": len(requests) / wall_s,
        "first_80_req_s": most / ends_s[most - 1],
        "output_tok_s": output / wall_s,
        "tok_s": (output + sum(len(request.prompt_ids) for request in requests)) / wall_s,
        "wall_s": wall_s,
        "both_lanes_pct": 100 * state.lanes.both_busy_s / wall_s,
        "preemptions": float(state.preemptions),
    }
    name = f"offline_{workload}_{policy}".translate(str.maketrans("-:=,.", "_____"))
    report.add(**{f"{name}_{figure}": value for figure, value in figures.items()})
    report.line(f"{f'{workload} {policy}':42}", *figures.values())


def make_loop(bench: Bench, policy: str, outlet: Outlet) -> Loop:
    """The scheduler's loop over the bench's engine, with the prefix cache off."""
    limits, chosen = bench.limits(MAX_ROWS), make_policy(policy)
    forecasts = bench.estimator() if chosen.needs_forecasts else None
    state = State(limits, KvLedger(limits.total_blocks + 1, limits.block_size, False), chosen.rules, forecasts)
    return Loop(state, chosen, bench.executor, bench.inbox, MonotonicClock(), outlet)


def random_requests(lengths: Sequence[RequestLengths], vocabulary: int) -> list[Request]:
    """One request for each, all at once, with its own random prompt and no end but its length."""
    rng = random.Random(1)
    now_s = time.monotonic()
    return [
        Request(number, rng.choices(range(vocabulary), k=each.prompt_tokens), each.output_tokens, now_s)
        for number, each in enumerate(lengths)
    ]


if __name__ == "__main__":
    from benchmarks.gpu.all import main

    main("offline")
