"""The same requests under several policies, over one engine: weights, kernels and lanes are loaded once.

Knows nothing about printing. An arm is a policy; a round runs every arm once, in an order that alternates, so that
a machine that drifts drifts for all of them. Answers are forced to their length and greedy, so the arms do the same
work and their tokens can be compared.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from bulletserve.compose import Engine
from bulletserve.core.errors import EngineError, PolicyError
from bulletserve.core.events import Arrived
from bulletserve.core.prefix import block_hashes
from bulletserve.core.request import Request
from bulletserve.scheduler.loop import Observer
from bulletserve.scheduler.policies import make_policy
from bulletserve.telemetry.collector import Collector
from bulletserve.telemetry.latency import Summary, summarise


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """Prompt ids that arrive `arrival_s` after the start and are answered with exactly `output_tokens` tokens."""

    arrival_s: float
    prompt_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One run of one arm. `both_lanes_share`: share of the time in which both lanes ran.

    `tokens` and `token_times_s` hold one tuple per prompt; times are of the monotonic clock, as `start_s`.
    """

    policy: str
    summary: Summary
    both_lanes_share: float
    preemptions: int
    start_s: float
    tokens: tuple[tuple[int, ...], ...]
    token_times_s: tuple[tuple[float, ...], ...]


def run_arm(engine: Engine, policy: str, prompts: Sequence[TimedPrompt], observer: Observer | None = None) -> ArmRun:
    """Serve the prompts once, from an empty cache. Times are those of the engine's loop."""
    collector = Collector()
    loop = engine.loop(collector, make_policy(policy), observer)
    requests = [
        Request(
            number,
            prompt.prompt_ids,
            prompt.output_tokens,
            0.0,
            block_hashes=block_hashes(prompt.prompt_ids, engine.limits.block_size),
        )
        for number, prompt in enumerate(prompts)
    ]
    start_s = time.monotonic() + 0.05
    timed = [replace(r, arrival_s=start_s + p.arrival_s) for r, p in zip(requests, prompts, strict=True)]
    for request in timed:
        collector.expect(request)

    ended = threading.Event()

    def feed() -> None:
        for request in sorted(timed, key=lambda one: one.arrival_s):
            if ended.wait(max(0.0, request.arrival_s - time.monotonic())):
                return
            engine.inbox.post(Arrived(request))

    feeder = threading.Thread(target=feed, name="feeder", daemon=True)
    feeder.start()
    try:
        while collector.open or not loop.state.is_idle:
            loop.turn()
            if loop.state.fault:
                raise EngineError(loop.state.fault)
            if loop.stalled:
                raise PolicyError(loop.stalled)
    finally:
        ended.set()
        feeder.join()
    if collector.messages:
        raise EngineError(next(iter(collector.messages.values())))
    loop.state.ledger.check_integrity()
    answers = [collector.answers[number] for number in range(len(prompts))]
    took_s = max(a.token_times_s[-1] for a in answers if a.token_times_s) - start_s
    return ArmRun(
        policy,
        summarise(answers),
        loop.state.lanes.both_busy_s / took_s,
        loop.state.preemptions,
        start_s,
        tuple(tuple(answer.tokens) for answer in answers),
        tuple(tuple(answer.token_times_s) for answer in answers),
    )


def compare(
    engine: Engine,
    policies: Sequence[str],
    prompts: Sequence[TimedPrompt],
    rounds: int,
    announce: Callable[[str], None] = lambda text: None,
) -> list[list[ArmRun]]:
    """`rounds` rounds of all arms after a short unmeasured one; result[round][arm], arms in the order given."""
    warm_up = [replace(prompt, arrival_s=0.0, output_tokens=2) for prompt in prompts[:3]]
    announce("warming up")
    for policy in policies:
        run_arm(engine, policy, warm_up)
    results: list[list[ArmRun]] = []
    for number in range(rounds):
        order = list(policies) if number % 2 == 0 else list(reversed(policies))
        runs: list[ArmRun] = []
        for policy in order:
            announce(f"round {number + 1} of {rounds}: {policy}")
            runs.append(run_arm(engine, policy, prompts))
        results.append(runs if number % 2 == 0 else runs[::-1])
    return results


FIGURES = {
    "ttft_p50_s": "TTFT p50",
    "ttft_p90_s": "TTFT p90",
    "tpot_p50_s": "TPOT p50",
    "tpot_p90_s": "TPOT p90",
    "longest_gap_s": "longest gap",
    "tokens_per_s": "tokens/s",
}
"""The figures of a comparison, by the field of `Summary`."""


def medians(results: list[list[ArmRun]], arm: int) -> dict[str, float]:
    """The median over rounds of each figure of an arm."""
    runs = [asdict(arms[arm].summary) for arms in results]
    return {figure: median(run[figure] for run in runs) for figure in FIGURES}


def paired_ratios(results: list[list[ArmRun]], arm: int, base: int = 0) -> dict[str, float]:
    """The median over rounds of each figure's ratio to the base arm's in the same round."""
    pairs = [(asdict(arms[arm].summary), asdict(arms[base].summary)) for arms in results]
    return {figure: median(one[figure] / other[figure] for one, other in pairs) for figure in FIGURES}


def same_answers(results: list[list[ArmRun]], arm: int, base: int = 0) -> float:
    """Share of answers, over all rounds, whose tokens equal the base arm's."""
    pairs = [(one, other) for arms in results for one, other in zip(arms[arm].tokens, arms[base].tokens, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)
