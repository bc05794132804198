"""What side-by-side lanes buy on this CPU: tokens per second on the demo's mix, and the gap that a prompt tears.

1. The demo's requests under `time_sliced` and the other policies, in alternating rounds; ratios within each round.
2. Four streams decode; after a while a prompt of 512 tokens arrives. The longest gap of any stream from its arrival
   to its first token, divided by the streams' median gap before it, per policy, median over the rounds.

Usage: python benchmarks/cpu_policies.py [--rounds 5] [--dtype bfloat16]
"""

import argparse
import itertools
import random
from pathlib import Path
from statistics import median

from bulletserve.commands.compare_requests import timed_prompts
from bulletserve.comparison.arm_run import TimedPrompt, run_arm
from bulletserve.comparison.campaign import Found, at_rates
from bulletserve.comparison.measured import Measured
from bulletserve.comparison.measuring import Measuring, Requests
from bulletserve.comparison.outcome import FIGURES, medians, paired_ratios, same_answers
from bulletserve.compose import Engine, build_engine
from bulletserve.core.config import EngineConfig
from bulletserve.core.slo import Slo
from record import record

POLICIES = ("time_sliced", "chunked_prefill", "static_split", "bullet")
STREAMS = 4
STREAM_TOKENS = 80
NEWCOMER_TOKENS = 512
NEWCOMER_ARRIVES_S = 1.2
PROMPTS = Path(__file__).parent.parent / "examples" / "demo_requests.jsonl"


def newcomer_gap(engine: Engine, policy: str, seed: int) -> tuple[float, float, float]:
    """Median gap before the newcomer, longest gap while it is prefilled, its time to the first token; seconds."""
    rng = random.Random(seed)
    vocabulary = engine.info.vocab_size

    def prompt(tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(tokens))

    streams = [TimedPrompt(0.0, prompt(32), STREAM_TOKENS) for _ in range(STREAMS)]
    run = run_arm(engine, policy, [*streams, TimedPrompt(NEWCOMER_ARRIVES_S, prompt(NEWCOMER_TOKENS), 2)])
    arrival_s, first_s = run.start_s + NEWCOMER_ARRIVES_S, run.answers[STREAMS].token_times_s[0]
    before: list[float] = []
    beside: list[float] = []
    streams_s = [answer.token_times_s for answer in run.answers[:STREAMS]]
    for times_s in streams_s:
        for a, b in itertools.pairwise(times_s):
            if b < arrival_s and a > run.start_s + 0.3:
                before.append(b - a)
            elif b >= arrival_s and a <= first_s:
                beside.append(b - a)
    assert before and beside and max(t[-1] for t in streams_s) > first_s, "the streams were too short"
    return median(before), max(beside), first_s - arrival_s


def _in_order(found: Found, policy: str) -> list[Measured]:
    return sorted(found.runs[policy], key=lambda one: one.round)


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    engine = build_engine(EngineConfig(dtype=options.dtype))
    metrics: dict[str, float] = {}
    chats = timed_prompts(PROMPTS, engine)
    measuring = Measuring(engine, Requests(PROMPTS.stem, len(chats), "", 0, lambda rate, number: chats), Slo())
    found = at_rates(measuring, POLICIES, [1.0], options.rounds)
    for error in measuring.failed.values():
        raise error
    base = _in_order(found, POLICIES[0])
    for policy in POLICIES:
        rounds = _in_order(found, policy)
        figures, ratios = medians(rounds), paired_ratios(rounds, base)
        for name in FIGURES:
            metrics[f"mix_{policy}_{name}"] = figures[name]
            metrics[f"mix_{policy}_{name}_x"] = ratios[name]
        metrics[f"mix_{policy}_both_lanes_x"] = figures["both_lanes_x"]
        metrics[f"mix_{policy}_same_answers_x"] = same_answers(rounds, base)
        for one in rounds:
            metrics[f"mix_{policy}_round{one.round}_tok_s"] = one.figures["tok_s"]
    for policy in POLICIES:
        gaps = [newcomer_gap(engine, policy, seed) for seed in range(options.rounds)]
        metrics[f"newcomer_{policy}_gap_before_ms"] = median(gap[0] for gap in gaps) * 1e3
        metrics[f"newcomer_{policy}_longest_gap_ms"] = median(gap[1] for gap in gaps) * 1e3
        metrics[f"newcomer_{policy}_gap_x"] = median(gap[1] / gap[0] for gap in gaps)
        metrics[f"newcomer_{policy}_ttft_ms"] = median(gap[2] for gap in gaps) * 1e3
    engine.close()
    for key, value in metrics.items():
        print(f"{key:50} {value:10.3f}")
    print(record(f"cpu_policies_{options.dtype}", metrics))


if __name__ == "__main__":
    main()
