"""The table of goodput and ratios that `goodput_simulated.py` prints, and its figures.

Knows nothing about runs. `chunked_prefill` counts with its best budget, chosen for each workload (the budget whose
goodput, as a share of the best budget's, has the greatest geometric mean over the tiers), or for each cell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bulletserve.telemetry.goodput import BUDGETS, Curve, Estimate, estimate, geometric_mean, ratio
from bulletserve.telemetry.metric_keys import estimate_metrics, key_part

CHUNKED = tuple(f"chunked_prefill:budget={budget}" for budget in BUDGETS)
BEST = "chunked_prefill (best budget)"

Cell = tuple[str, str]
"""Workload and tier."""

Found = Mapping[Cell, Mapping[str, Sequence[Curve]]]
"""By cell and arm, a curve for each seed."""


@dataclass(frozen=True)
class Options:
    """`base`: the arm that ratios are to. `ours`: the arm that is compared with the best of all others in each cell.

    `by_cell`: the best budget is chosen for each cell instead of each workload, which is harder on `ours`.
    """

    base: str = BEST
    ours: str = ""
    by_cell: bool = False


def report(found: Found, options: Options) -> dict[str, float]:
    """Print the table; every figure of it by name."""
    values = {cell: {arm: estimate(curves) for arm, curves in arms.items()} for cell, arms in found.items()}
    budgets = best_budgets(values, by_cell=options.by_cell)
    metrics: dict[str, float] = {}
    ratios: dict[str, list[float]] = {}
    below: list[str] = []
    for cell, arms in found.items():
        base = budgets.get(cell, "") if options.base == BEST else options.base
        print(f"\n{cell[0]} {cell[1]}" + (f"   ({base})" if options.base == BEST else ""))
        for arm, curves in arms.items():
            against = ratio(curves, arms[base])
            if against is not None:
                ratios.setdefault(arm, []).append(against.value)
            metrics |= _figures(cell, arm, values[cell][arm], against)
            print(f"  {arm:48} {values[cell][arm].describe():26} {'-' if against is None else against.describe()} x")
        if options.ours in arms:
            below += _against_the_best(cell, options.ours, arms, values[cell], metrics)
    print(f"\ngeometric mean of the ratios to {options.base}, each capped at 3:")
    for arm, listed in ratios.items():
        metrics[f"mean_ratio_{key_part(arm)}_x"] = geometric_mean(listed)
        print(f"  {arm:48} {geometric_mean(listed):.3f} over {len(listed)} cells")
    if options.ours:
        print(f"cells in which {options.ours} is below the best other arm by more than the interval: {below or 'none'}")
    return metrics


def best_budgets(values: Mapping[Cell, Mapping[str, Estimate]], *, by_cell: bool) -> dict[Cell, str]:
    """The budget of `chunked_prefill` that counts in each cell, of those that were run."""
    chosen: dict[Cell, str] = {}
    for cell, arms in values.items():
        listed = [arm for arm in arms if arm in CHUNKED]
        if not listed:
            continue
        cells = [cell] if by_cell else [other for other in values if other[0] == cell[0]]
        shares = {arm: geometric_mean(_share(values[one], arm, listed) for one in cells) for arm in listed}
        chosen[cell] = max(listed, key=lambda arm: shares[arm])
    return chosen


def _share(of_cell: Mapping[str, Estimate], arm: str, listed: Sequence[str]) -> float:
    most = max(of_cell[one].value for one in listed)
    return of_cell[arm].value / most if most else 1.0


def _against_the_best(
    cell: Cell,
    ours: str,
    arms: Mapping[str, Sequence[Curve]],
    values: Mapping[str, Estimate],
    metrics: dict[str, float],
) -> list[str]:
    others = [arm for arm in arms if arm.partition(":")[0] != ours.partition(":")[0]]
    if not others:
        return []
    best = max(others, key=lambda arm: values[arm].value)
    against = ratio(arms[ours], arms[best])
    if against is None:
        return []
    metrics[f"against_best_{key_part(cell[0])}_{cell[1]}_{key_part(ours)}_x"] = against.value
    print(f"  {ours} against the best other arm, {best}: {against.describe()} x")
    return [f"{cell[0]} {cell[1]}"] if against.high < 1 else []


def _figures(cell: Cell, arm: str, value: Estimate, against: Estimate | None) -> dict[str, float]:
    key = f"{key_part(cell[0])}_{cell[1]}_{key_part(arm)}"
    ratios = {} if against is None else estimate_metrics(f"ratio_{key}", against, "x")
    return estimate_metrics(f"goodput_{key}", value, "req_s") | ratios
