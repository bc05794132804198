"""What forecasts cost: one question, and the set that a decision asks, from the memo and for the first time.

    python benchmarks/estimator.py [--questions 1000] [--repeats 7]

A decision's set: 7 partitions, on each prefill beside decode and decode beside prefill. `memo`: asked before. `new`:
steps that were never seen. `step`: as a decode batch goes on, every row a token longer each time, prefill chunks as
they come; the share of sets with anything new in them is told. Budget of a set as the scheduler meets it: 150
microseconds. CPU times of one thread, garbage collection off; every question is asked in several runs and its least
time counts, which takes out what else the machine does.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.calibration import datasheet
from bulletserve.estimator.estimator import Estimator
from bulletserve.telemetry.latency import quantile
from record import record

BUDGET_US = 150
LAYERS = 32
LLAMA_8B = ModelShape("llama", LAYERS, 4096, 14336, 32, 8, 128, 128256, 131072)
SPLITS = tuple(Partition(132 - decode_sms, decode_sms) for decode_sms in (16, 24, 32, 48, 64, 80, 96))
LATTICE = Lattice.of_splits(132, SPLITS)

Pair = tuple[StepShape, StepShape]


def fresh() -> Estimator:
    """An estimator that has seen nothing, of a card that is at its power cap with both lanes at work."""
    calibration = datasheet("NVIDIA H200", 132)
    assert calibration is not None
    constants = replace(calibration.parameters, power_cap_w=450.0)
    estimator = Estimator(replace(calibration, parameters=constants), LLAMA_8B)
    estimator.prepare(LATTICE, 256, 8192)
    return estimator


def ask(estimator: Estimator, pair: Pair) -> None:
    """A decision's set."""
    decode, prefill = pair
    for split in SPLITS:
        estimator.predict(prefill, split, decode)
        estimator.predict(decode, split, prefill)


def timed_us(work: Callable[..., object], *given: object) -> float:
    """CPU microseconds of one call."""
    began_ns = time.thread_time_ns()
    work(*given)
    return (time.thread_time_ns() - began_ns) / 1e3


def any_pair(rng: random.Random) -> Pair:
    """A decode batch and a prefill layer group."""
    rows = rng.randrange(1, 257)
    decode = StepShape.decode(rows, rows * rng.randrange(100, 8000), LAYERS)
    prompt = (rng.randrange(100, 8000), rng.choice((0, rng.randrange(4000))))
    return decode, StepShape.prefill([prompt], rng.choice((4, 8, 32)), 1)


def as_it_goes(rng: random.Random, steps: int) -> list[Pair]:
    """`steps` decisions: a batch of about 64 rows that grows and now and then changes, a new prompt every tenth."""
    rows, context = 64, 64 * 1500
    prefill = StepShape.prefill([(2048, 0)], 8, 0)
    pairs = []
    for step in range(steps):
        if step % 10 == 0:
            prefill = StepShape.prefill([(rng.randrange(200, 4096), 0)], 8, 0)
        if step % 5 == 0:
            change = rng.choice((-2, -1, 1, 2))
            rows, context = rows + change, context + 1500 * change
        context += rows
        pairs.append((StepShape.decode(rows, context, LAYERS), prefill))
    return pairs


Asked = list[Callable[[Estimator], object]]


def least_us(asked: Asked, repeats: int) -> list[float]:
    """The least time of each question over runs that ask all of them in order, each of a fresh estimator."""
    runs = []
    for _ in range(repeats):
        estimator = fresh()
        runs.append([timed_us(question, estimator) for question in asked])
    return [min(times) for times in zip(*runs, strict=True)]


def one(step: StepShape, partition: Partition, beside: StepShape | None = None) -> Callable[[Estimator], object]:
    """A single forecast."""
    return lambda estimator: estimator.predict(step, partition, beside)


def a_set(pair: Pair) -> Callable[[Estimator], object]:
    """A decision's forecasts."""
    return lambda estimator: ask(estimator, pair)


def share_with_new(pairs: list[Pair]) -> float:
    """Share of sets in which something was not asked before."""
    estimator, kept = fresh(), [0]
    for pair in pairs:
        ask(estimator, pair)
        kept.append(len(estimator._forecasts))
    return sum(a != b for a, b in pairwise(kept)) / len(pairs)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rng = random.Random(1)
    gc.disable()
    pairs = [any_pair(rng) for _ in range(options.questions)]
    going = as_it_goes(rng, options.questions)
    (decode, prefill), known = pairs[0], [pairs[0]] * options.questions
    asked: dict[str, Asked] = {
        "forecast_memo": [one(decode, SPLITS[0], prefill)] * options.questions,
        "forecast_alone_new": [one(d, Partition(0, 132)) for d, _ in pairs],
        "forecast_new": [one(d, SPLITS[2], p) for d, p in pairs],
        "set_memo": [a_set(pair) for pair in known],
        "set_new": [a_set(pair) for pair in pairs],
        "set_step": [a_set(pair) for pair in going],
    }
    metrics: dict[str, float] = {}
    for name, questions in asked.items():
        took = least_us(questions, options.repeats)
        metrics |= {f"{name}_p{q}_us": quantile(took, q / 100) for q in (50, 99)}
        metrics[f"{name}_mean_us"] = sum(took) / len(took)
    metrics["set_step_with_new_x"] = share_with_new(going)
    for name, value in metrics.items():
        print(f"{name:28} {value:8.2f}")
    print("wrote", record("estimator", metrics))


if __name__ == "__main__":
    main()
