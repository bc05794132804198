"""What `bullet compare` shows and writes of its runs.

Knows nothing about how they were made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from bulletserve.comparison.measured import Measured
from bulletserve.comparison.other_programs import TOO_MUCH
from bulletserve.comparison.outcome import (
    FIGURES,
    goodput_of,
    goodput_ratio,
    incomplete_rounds,
    medians,
    paired_ratios,
    same_answers,
)
from bulletserve.comparison.run_folder import RunName, rate_text
from bulletserve.core.slo import Slo
from bulletserve.telemetry.goodput import Estimate
from bulletserve.telemetry.metric_keys import estimate_metrics, key_part

Goodputs = Mapping[str, tuple[Estimate | str, Estimate | None]]
"""Of each arm its goodput, or why there is none, and the ratio to the first arm's, where both have one."""

_PARTITIONS_SHOWN = 3
_NAMED = 3
_FORECASTS = "forecast_error_"

LEGEND = (
    "Partitions: SMs (of a CPU: threads) of prefill + decode by their share of the time. Forecasts off: mean error of "
    "prefill/decode/mixed steps."
)

MEDIANS = "A ratio is the median of those within a round, which need not be the quotient of the medians shown."

_MORE: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("mixed steps", "mixed_steps_x", lambda value: f"{value:.0%} of steps"),
    ("switches", "switches_per_s", lambda value: f"{value:.1f}/s"),
    ("energy", "joules_per_token_j", lambda value: f"{value:.2f} J/token"),
    ("power", "power_w", lambda value: f"{value:.0f} W"),
    ("clock", "clock_mhz", lambda value: f"{value:.0f} MHz"),
    ("preempted", "preemptions_n", lambda value: f"{value:.0f}"),
    ("other programs", "others_x", lambda value: f"{value:.0%} of the cores"),
    ("refused", "refused_n", lambda value: f"{value:.0f}"),
)


@dataclass(frozen=True)
class Column:
    """One arm at one rate: its rounds, and those that ratios are to (none: no ratios)."""

    heading: str
    rounds: Sequence[Measured]
    base: Sequence[Measured] = ()


def figure_table(title: str, columns: Sequence[Column], slo: Slo | None) -> Table:
    """Figures by row: medians over rounds, each with its ratio. What is nought or unknown everywhere has no row."""
    table = Table("", title=title, title_justify="left")
    for column in columns:
        table.add_column(column.heading, justify="right")
    figures = [medians(column.rounds) for column in columns]
    if slo is not None:
        table.add_row("met", *(f"{_attainment(column.rounds, slo):.1%}" for column in columns))
    for name, label in FIGURES.items():
        ratios = [paired_ratios(column.rounds, column.base) if column.base else {} for column in columns]
        cells = zip(figures, ratios, strict=True)
        table.add_row(label, *(_figure(name, of.get(name)) + _times(to.get(name)) for of, to in cells))
    table.add_row("both lanes busy", *(f"{of['both_lanes_x']:.0%} of the time" for of in figures))
    for label, name, words in _MORE:
        if any(of.get(name) for of in figures):
            table.add_row(label, *(words(of[name]) if name in of else "-" for of in figures))
    if any(name.startswith(_FORECASTS) for of in figures for name in of):
        table.add_row("forecasts off", *map(_forecasts, figures))
    table.add_row("partitions", *(_partitions(column.rounds) for column in columns))
    if any(column.base for column in columns):
        table.add_row("same answers", *(f"{same_answers(column.rounds, column.base):.0%}" for column in columns))
    return table


def goodput_lines(runs: Mapping[str, Sequence[Measured]], slo: Slo, requests: int) -> Goodputs:
    """By arm, of a list of so many requests."""
    found = {policy: goodput_of(of_arm, slo, requests) for policy, of_arm in runs.items() if of_arm}
    base = next(iter(runs))
    both = [policy for policy in found if isinstance(found[policy], Estimate) and isinstance(found.get(base), Estimate)]
    return {
        policy: (value, goodput_ratio(runs[policy], runs[base], slo) if policy in both and policy != base else None)
        for policy, value in found.items()
    }


def left_out(runs: Mapping[str, Sequence[Measured]]) -> list[str]:
    """In words, the rounds that goodput leaves out as they lack rates."""
    return [
        f"{policy}: round {number + 1} is left out of goodput, it has no run at {', '.join(map(str, lacks))} req/s"
        for policy, of_arm in runs.items()
        for number, lacks in incomplete_rounds(of_arm).items()
    ]


def busy_machine(runs: Mapping[str, Sequence[Measured]]) -> list[str]:
    """In words, the runs that other programs disturbed, and what to do."""
    found = [(one, one.figures.get("others_x", 0.0)) for of_arm in runs.values() for one in of_arm]
    disturbed = [(one, share) for one, share in found if share > TOO_MUCH]
    if not disturbed:
        return []
    worst = sorted(disturbed, key=lambda pair: -pair[1])[:_NAMED]
    named = [f"{one.policy} at {rate_text(one.rate)} req/s, round {one.round + 1}: {share:.0%}" for one, share in worst]
    return [
        f"THE MACHINE WAS BUSY: other programs took part of the engine's cores in {len(disturbed)} of {len(found)} "
        f"runs, whose figures and ratios cannot be trusted ({'; '.join(named)}). Run it again on an idle machine (a "
        "run that --runs has kept only once its file is gone); with --rounds 3 or more figures are medians over rounds."
    ]


def goodput_table(lines: Goodputs) -> Table:
    """Goodput and paired ratios."""
    table = Table(pad_edge=False)
    table.add_column("policy", overflow="fold")
    table.add_column("goodput, req/s [95 %]", justify="right")
    table.add_column("ratio [95 %]", justify="right", no_wrap=True)
    for policy, (value, against) in lines.items():
        told = value if isinstance(value, str) else value.describe()
        table.add_row(policy, told, "-" if against is None else against.describe())
    return table


def metrics_of(
    workload: str,
    seed: int,
    runs: Mapping[str, Sequence[Measured]],
    goodputs: Goodputs,
    slo: Slo | None,
) -> dict[str, float]:
    """Flat figures; keys end in their unit."""
    found: dict[str, float] = {}
    for of_arm in runs.values():
        for one in of_arm:
            stem = RunName(workload, one.policy, one.rate, seed, one.round).stem
            found |= {f"{stem}_{name}": value for name, value in one.figures.items()}
            if slo is not None:
                found[f"{stem}_met_x"] = float(one.met(slo).mean())
    base = next(iter(runs))
    for policy, (value, against) in goodputs.items():
        key = f"goodput_{key_part(workload)}_{key_part(policy)}"
        if isinstance(value, Estimate):
            found |= estimate_metrics(key, value, "req_s")
        if against is not None:
            found |= estimate_metrics(f"{key}_over_{key_part(base)}", against, "x")
    return found


def _attainment(rounds: Sequence[Measured], slo: Slo) -> float:
    return sum(float(one.met(slo).mean()) for one in rounds) / len(rounds)


def _figure(name: str, value: float | None) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.1f}" if name == "tok_s" else f"{value:.{0 if value >= 100 else 1}f} ms"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f" {ratio:6.2f}x"


def _forecasts(figures: Mapping[str, float]) -> str:
    """Of prefill, decode and mixed steps."""
    errors = [figures.get(f"{_FORECASTS}{kind}_x") for kind in ("prefill", "decode", "mixed")]
    return "/".join("-" if error is None else f"{error:.0%}" for error in errors)


def _partitions(rounds: Sequence[Measured]) -> str:
    """The partitions that took most of the time, as the mean over rounds."""
    names = {name for one in rounds for name in one.partitions}
    shares = {name: sum(one.partitions.get(name, 0.0) for one in rounds) / len(rounds) for name in names}
    first = sorted(shares, key=lambda name: (-shares[name], name))[:_PARTITIONS_SHOWN]
    return "\n".join(f"{name}: {shares[name]:.0%}" for name in first)
