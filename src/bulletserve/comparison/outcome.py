"""What the runs of a comparison come to: figures over rounds, ratios to the first arm, goodput.

Knows nothing about how runs were made or how they are shown. A ratio is taken within a round, where the machine was the
same; goodput and its ratio are those of `telemetry/goodput`, paired over the same requests.
"""

from collections.abc import Iterable, Sequence
from math import isfinite
from statistics import median

from bulletserve.comparison.measured import Measured
from bulletserve.core.slo import Slo
from bulletserve.telemetry.goodput import Curve, Estimate, Met, estimate_or_why, ratio

FIGURES = {
    "ttft_p50_ms": "TTFT p50",
    "ttft_p90_ms": "TTFT p90",
    "tpot_p50_ms": "TPOT p50",
    "tpot_p90_ms": "TPOT p90",
    "itl_p99_ms": "ITL p99",
    "longest_gap_ms": "longest gap",
    "tok_s": "tokens/s",
}
"""The figures with a ratio, by their names in `Measured.figures`."""


def medians(rounds: Sequence[Measured]) -> dict[str, float]:
    """The median over rounds of each figure; of those that were measured in all of them."""
    names = [name for name in rounds[0].figures if all(name in one.figures for one in rounds)]
    return {name: median(one.figures[name] for one in rounds) for name in names}


def paired_ratios(rounds: Sequence[Measured], base: Sequence[Measured]) -> dict[str, float]:
    """The median over rounds of each figure's ratio to the base arm's in the same round."""
    pairs = list(zip(rounds, base, strict=True))
    found: dict[str, float] = {}
    for name in FIGURES:
        ratios = [_over(one.figures.get(name), other.figures.get(name)) for one, other in pairs]
        if all(map(isfinite, ratios)):
            found[name] = median(ratios)
    return found


def same_answers(rounds: Sequence[Measured], base: Sequence[Measured]) -> float:
    """Share of answers, over all rounds, whose tokens equal the base arm's."""
    pairs = [
        (a.answer, b.answer)
        for one, other in zip(rounds, base, strict=True)
        for a, b in zip(one.scored, other.scored, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def curves_of(runs: Iterable[Measured], slo: Slo) -> dict[int, Curve]:
    """One arm's curve of each round that has every rate that was run, by the round's number."""
    runs = tuple(runs)
    lacking = incomplete_rounds(runs)
    found: dict[int, dict[float, Met]] = {}
    for one in sorted(runs, key=lambda one: one.round):
        if one.round not in lacking:
            found.setdefault(one.round, {})[one.rate] = one.met(slo)
    return dict(found)


def incomplete_rounds(runs: Iterable[Measured]) -> dict[int, list[float]]:
    """One arm's rounds that goodput leaves out, by number, each with the rates that it lacks."""
    found: dict[int, set[float]] = {}
    for one in runs:
        found.setdefault(one.round, set()).add(one.rate)
    rates = {rate for of_round in found.values() for rate in of_round}
    return {number: sorted(rates - found[number]) for number in sorted(found) if rates - found[number]}


def goodput_of(runs: Sequence[Measured], slo: Slo, requests: int) -> Estimate | str:
    """One arm's, of a list of so many requests, or why its runs do not tell it."""
    return estimate_or_why({f"round {number + 1}": curve for number, curve in curves_of(runs, slo).items()}, requests)


def goodput_ratio(runs: Sequence[Measured], base: Sequence[Measured], slo: Slo) -> Estimate | None:
    """Of two arms with a goodput, over the same requests of the rounds that both have; None where they share none."""
    ours, theirs = curves_of(runs, slo), curves_of(base, slo)
    both = [number for number in ours if number in theirs]
    return ratio([ours[number] for number in both], [theirs[number] for number in both]) if both else None


def _over(one: float | None, other: float | None) -> float:
    return one / other if one is not None and other else float("nan")
