"""The definitions of attainment and goodput, in one place, for simulated and for real runs alike.

Knows nothing about where times were taken, nor how a rate was found; `latency` has the definitions of TTFT and TPOT.

- A workload is a list of 600 requests; at a rate of r their arrivals, which come one a second, are divided by r.
- Scored are requests 100 to 499 in the order of arrival: the first fill the engine, the last keep it filled. Of the
  short form for long contexts on a GPU (240 requests), requests 40 to 199.
- Attainment at a rate: the share of the scored that met every target of theirs.
- Goodput: the rate at which attainment falls through 90 %, between two rates at most 5 % apart by a straight line. A
  policy that never attains 90 %, at however low a rate, has 0.
- Its interval: the scored requests drawn again, with replacement, as often as there are, the same draw at every rate;
  2.5th to 97.5th percentile over the draws. With several seeds (arrival gaps, device), the seeds are drawn too, and
  goodput is the mean over them.
- A ratio of two policies is paired: the same draws of seeds and requests for both.
- Tiers: TTFT and TPOT targets for every request, loose, middle and tight, wider for long contexts.
- `chunked_prefill` counts with its best token budget.
- A mean over cells (workload and tier) is the geometric mean of the ratios, each capped at 3; a cell where both are
  zero is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo
from bulletserve.telemetry.latency import Answer

ATTAINED = 0.9
BUDGETS = (256, 512, 1024, 2048, 8192)
"""Token budgets of a step of which `chunked_prefill` counts with the best."""

MOST_APART = 1.05
"""Most that two rates may be apart (as a factor) for a crossing between them."""

RATIO_CAP = 3.0
_DRAWS = 1000
_LEAST_RATIO = 1e-3  # of a ratio whose policy has no goodput where the other has some: its logarithm must be finite

Met = NDArray[np.bool_]
"""Which scored request met its targets, in the order of arrival."""

Curve = Mapping[float, Met]
"""By rate, for one policy, tier and seed."""


def _tiers(ttft_s: float, **tpot_s: float) -> tuple[Slo, ...]:
    return tuple(Slo(name, ttft_s, value) for name, value in tpot_s.items())


TIERS = _tiers(0.3, loose=0.020, middle=0.012, tight=0.008)
LONG_TIERS = _tiers(2.0, loose=0.040, middle=0.025, tight=0.015)
LONG_WORKLOADS = ("long-context",)


def tiers_of(workload: str) -> tuple[Slo, ...]:
    """The three tiers of a workload, by its name."""
    return LONG_TIERS if workload in LONG_WORKLOADS else TIERS


def scored(count: int) -> range:
    """Which of a run's `count` requests are scored. Raises `ConfigError` for other than 600 or 240 requests or more."""
    if count >= 600:
        return range(100, 500)
    if count >= 240:
        return range(40, 200)
    raise ConfigError(f"goodput is defined over 600 requests (240 in its short form), not {count}")


def counted(count: int) -> range:
    """Which of a run's `count` requests its figures are of: the scored, or all of a list that is too short for that."""
    return range(count) if count < 240 else scored(count)


def met(answers: Sequence[Answer], slo: Slo) -> Met:
    """Which of these answers met their targets."""
    return np.array([answer.meets(slo) for answer in answers], dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float

    def describe(self) -> str:
        """Such as 9.31 [9.05, 9.60]."""
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def crossing(rates: Sequence[float], attainments: Sequence[float]) -> float:
    """The rate at which attainment first falls below 90 %, by a straight line; rates rise.

    0 if it is below at the lowest rate, the highest rate if it never is.
    """
    for at, attained in enumerate(attainments):
        if attained < ATTAINED:
            if not at:
                return 0.0
            before = attainments[at - 1]
            share = (before - ATTAINED) / (before - attained)
            return rates[at - 1] + share * (rates[at] - rates[at - 1])
    return rates[-1]


def goodput(curve: Curve) -> float:
    """The crossing of a curve. Raises `ConfigError` if it lies between rates that are too far apart."""
    rates = sorted(curve)
    attained = [float(curve[rate].mean()) for rate in rates]
    found = crossing(rates, attained)
    above = next((rate for rate in rates if rate > found), None)
    below = max((rate for rate in rates if rate <= found), default=None)
    if above is not None and below is not None and above > below * MOST_APART:
        raise ConfigError(f"goodput lies between {below:.3g} and {above:.3g} req/s: run rates at most 5 % apart")
    return found


def estimate(curves: Sequence[Curve], seed: int = 0) -> Estimate:
    """Goodput over seeds, with its interval."""
    value = float(np.mean([goodput(curve) for curve in curves]))
    (drawn,) = _draws([curves], seed)
    return Estimate(value, *_interval(drawn))


def estimate_or_why(curves: Mapping[str, Curve], requests: int) -> Estimate | str:
    """Goodput of a list of so many requests over seeds or rounds, by what they are called; or in words why the rates
    that were run do not tell it: every curve has to have its own crossing between two of them."""
    if all(len(curve) < 2 for curve in curves.values()):
        return _TOO_FEW
    try:
        scored(requests)
        missing = {name: _why_none(curve) for name, curve in curves.items()}
    except ConfigError as error:
        return str(error)
    told = [why if len(curves) == 1 else f"{name}: {why}" for name, why in missing.items() if why]
    return "; ".join(told) if told else estimate(list(curves.values()))


_TOO_FEW = "goodput needs whole runs at two rates or more"


def _why_none(curve: Curve) -> str:
    """Why this curve has no crossing, and where to look for it; "" if it has one. Raises `ConfigError` as `goodput`."""
    if len(curve) < 2:
        return _TOO_FEW
    found, lowest, highest = goodput(curve), min(curve), max(curve)
    if not found:
        return f"goodput is below {lowest:.4g} req/s: attainment there is below 90 %, run lower rates"
    if float(curve[highest].mean()) >= ATTAINED and found >= highest:
        return (
            f"goodput is {highest:.4g} req/s or more: attainment is 90 % or above at every rate that was run, "
            "run higher rates"
        )
    return ""


def ratio(ours: Sequence[Curve], theirs: Sequence[Curve], seed: int = 0) -> Estimate | None:
    """Ours over theirs, capped, the same seeds in both; None where neither has any goodput."""
    one, other = (float(np.mean([goodput(curve) for curve in curves])) for curves in (ours, theirs))
    if not one and not other:
        return None
    pairs = zip(*_draws([ours, theirs], seed), strict=True)
    return Estimate(_capped(one, other), *_interval([_capped(a, b) for a, b in pairs if a or b]))


def geometric_mean(ratios: Iterable[float]) -> float:
    """Of the cells' ratios, each capped already; nan of none."""
    logs = [log(max(value, _LEAST_RATIO)) for value in ratios]
    return exp(sum(logs) / len(logs)) if logs else float("nan")


def _capped(one: float, other: float) -> float:
    return min(RATIO_CAP, one / other) if other else RATIO_CAP


def _interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(np.array(values), [2.5, 97.5])
    return float(low), float(high)


def _draws(policies: Sequence[Sequence[Curve]], seed: int) -> list[list[float]]:
    """Goodput of each policy over draws of seeds and requests, the same for all of them."""
    seeds = len(policies[0])
    if any(len(curves) != seeds for curves in policies):
        raise ConfigError("policies are compared over the same seeds")
    rng = np.random.default_rng(seed)
    found: list[list[float]] = [[] for _ in policies]
    tables = [[_table(curve) for curve in curves] for curves in policies]
    for _ in range(_DRAWS):
        chosen = rng.integers(seeds, size=seeds) if seeds > 1 else [0]
        requests = tables[0][0][1].shape[1]
        picks = rng.integers(requests, size=(len(chosen), requests))
        for values, of_policy in zip(found, tables, strict=True):
            rates_of = [_drawn(of_policy[at], pick) for at, pick in zip(chosen, picks, strict=True)]
            values.append(sum(rates_of) / len(rates_of))
    return found


def _table(curve: Curve) -> tuple[list[float], NDArray[np.bool_]]:
    rates = sorted(curve)
    return rates, np.array([curve[rate] for rate in rates])


def _drawn(table: tuple[list[float], NDArray[np.bool_]], pick: NDArray[np.integer[Any]]) -> float:
    """The crossing in one draw; below the lowest rate that was run, that rate, unless the policy has no goodput."""
    rates, flags = table
    found = crossing(rates, flags[:, pick].mean(axis=1).tolist())
    return max(found, rates[0]) if flags[0].mean() >= ATTAINED else found
