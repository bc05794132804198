"""What a policy costs an idle engine: one prompt, then one stream, through the scheduler's loop and beside nothing.

    python -m benchmarks.gpu.idle_tax [--idle-policy SPEC ...] [--idle-runs 15]

`first token`: from the arrival of a prompt of 2048 tokens to the turn that tells its first token, median over prompts
with pauses between them; against a prefill of 2048 tokens by itself on all SMs, again and again. `per token`: the
median gap of its stream; against decode steps of one row of that context on all SMs.
"""

import time
from argparse import ArgumentParser
from itertools import pairwise
from statistics import median

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.offline import make_loop, random_requests
from benchmarks.gpu.report import Report

from bulletserve.core.events import Arrived
from bulletserve.telemetry.collector import Collector
from bulletserve.workload.request_list import RequestLengths

PROMPT, ANSWER = 2048, 200
PAUSE_S = 0.1
POLICIES = ("bullet", "chunked_prefill:budget=8192", "time_sliced")


def add_options(parser: ArgumentParser) -> None:
    """Options of this script."""
    parser.add_argument("--idle-policy", nargs="+", default=POLICIES, help="policies of idle_tax")
    parser.add_argument("--idle-runs", type=int, default=15, help="prompts of each policy of idle_tax")


def run(bench: Bench, report: Report) -> None:
    """Measure and print."""
    prompts = bench.prompts(PROMPT, bench.total_sms, bench.pool())
    prefill_ms = bench.driver.run(prompts, seconds=0.5, least=4, warm_s=0.2).lanes[0].prompt_ms
    stream = bench.decode(1, PROMPT + ANSWER // 2, bench.total_sms, bench.pool())
    decode_ms = bench.driver.run(stream, seconds=0.5, least=20, warm_s=0.2).lanes[0].period_ms
    report.add(prefill_alone_ms=prefill_ms, decode_alone_ms=decode_ms)
    report.line("idle tax, ms", "first", "x alone", "token", "x alone")
    report.line("by itself", prefill_ms, 1.0, decode_ms, 1.0)
    for policy in bench.options.idle_policy:
        first_ms, token_ms = _alone(bench, policy, bench.options.idle_runs)
        name = policy.translate(str.maketrans("-:=,.", "_____"))
        report.add(
            **{
                f"{name}_first_token_ms": first_ms,
                f"{name}_first_token_over_prefill_x": first_ms / prefill_ms,
                f"{name}_per_token_ms": token_ms,
                f"{name}_per_token_over_decode_x": token_ms / decode_ms,
            }
        )
        report.line(policy, first_ms, first_ms / prefill_ms, token_ms, token_ms / decode_ms)


def _alone(bench: Bench, policy: str, runs: int) -> tuple[float, float]:
    """Median time to the first token and median gap, ms, of requests that are never beside another."""
    collector = Collector()
    loop = make_loop(bench, policy, collector)
    lengths = [RequestLengths(0.0, PROMPT, ANSWER) for _ in range(runs + 1)]
    firsts, gaps = list[float](), list[float]()
    for number, request in enumerate(random_requests(lengths, bench.shape.vocab_size)):
        time.sleep(PAUSE_S)
        collector.expect(request)
        posted_s = time.monotonic()
        bench.inbox.post(Arrived(request))
        while collector.open or not loop.state.is_idle:
            loop.turn()
        if number:  # the first one warms up
            times_s = collector.answers[request.id].token_times_s
            firsts.append(times_s[0] - posted_s)
            gaps += [after - before for before, after in pairwise(times_s)]
    return median(firsts) * 1e3, median(gaps) * 1e3


if __name__ == "__main__":
    from benchmarks.gpu.all import main

    main("idle_tax")
