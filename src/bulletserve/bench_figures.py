"""Pictures of runs against a server: latencies, gaps between tokens, the course of a run, attainment over rate.

Knows nothing about how anything was measured. Needs matplotlib.
"""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bulletserve.client.report import RateResult
from bulletserve.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, STYLE, log_ms, save_figure
from bulletserve.telemetry.goodput import ATTAINED, Estimate

_LOOKS = tuple(zip((BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY), "osD^vP*", strict=True))
_LEAST_MS = 0.1  # the end of a logarithmic axis: tokens that came together have a gap of 0

_FEWEST_BINS, _MOST_BINS = 12, 120  # of a run's time; a bin should hold some twenty tokens


def draw_all(folder: Path, title: str, note: str, results: Sequence[RateResult], goodput: Estimate | str) -> list[Path]:
    """Write every figure into `folder`, each as SVG and PNG; the paths of the PNGs. `note` stands beneath each.

    Runs without a token have no curve of latencies.
    """
    figures: dict[str, Figure] = {}
    with matplotlib.rc_context(STYLE):
        answered = [one for one in results if any(o.answer.token_times_s for o in one.scored)]
        if answered:
            figures["latency"] = _latencies(answered)
            figures["gaps"] = _gaps(answered)
        figures["course"] = _courses(results)
        at_rates = [one for one in results if isfinite(one.run.rate)]
        if len(at_rates) > 1:
            figures["attainment"] = _attainment(at_rates, goodput)
        written = []
        for name, figure in figures.items():
            figure.suptitle(title, x=0.01, ha="left", fontsize=11)
            figure.text(0.01, -0.01, note, ha="left", va="top", fontsize=8, color=GREY)
            written.append(save_figure(figure, folder, name))
    return written


def _latencies(results: Sequence[RateResult]) -> Figure:
    """Shares of the scored requests whose TTFT and TPOT were at most so long; requests without any never get there."""
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 4.4), layout="constrained", sharey=True)
    for (colour, marker), one in zip(_cycle(len(results)), results, strict=True):
        answers = [o.answer for o in one.scored]
        several = [a for a in answers if len(a.token_times_s) != 1]  # an answer of one token has no TPOT
        ttfts = [a.ttft_s for a in answers if a.token_times_s]
        tpots = [a.tpot_s for a in several if a.tpot_s is not None]
        for panel, values, count in zip(panels, (ttfts, tpots), (len(answers), len(several)), strict=True):
            ordered = sorted(max(_LEAST_MS, value * 1e3) for value in values)
            shares = [100 * (at + 1) / count for at in range(len(ordered))]
            every = max(1, len(ordered) // 8)
            label = f"{one.run.rate:g} req/s"
            panel.plot(ordered, shares, color=colour, marker=marker, markevery=every, markersize=5, label=label)
    slo = results[0].slo
    for panel, name, target_s in (
        (panels[0], "time to first token", slo.ttft_s),
        (panels[1], "time per token", slo.tpot_s),
    ):
        if target_s is not None:
            panel.axvline(target_s * 1e3, color="0.6", linestyle="--", linewidth=1)
        panel.set(xlabel=f"{name}, ms (dashed: the target)" if target_s else f"{name}, ms")
        log_ms(panel)
    panels[0].set(ylabel="requests, %", ylim=(0, 102))
    panels[1].legend(loc="lower right", fontsize=8)
    return figure


def _gaps(results: Sequence[RateResult]) -> Figure:
    """How many of all gaps between tokens were longer than so much."""
    figure, panel = plt.subplots(figsize=(8.4, 4.4), layout="constrained")
    most = 1
    for (colour, marker), one in zip(_cycle(len(results)), results, strict=True):
        gaps = np.sort(np.array([gap for o in one.scored for gap in o.answer.gaps_s], dtype=float))
        if len(gaps):
            most = max(most, len(gaps))
            left = 1.0 - np.arange(len(gaps)) / len(gaps)
            at = np.unique(np.concatenate([np.geomspace(1, len(gaps), 400), [len(gaps)]]).astype(int))
            x, y = np.maximum(gaps[len(gaps) - at], _LEAST_MS / 1e3) * 1e3, left[len(gaps) - at] * 100
            panel.plot(x, y, color=colour, marker=marker, markevery=max(1, len(at) // 7), markersize=5,
                       label=f"{one.run.rate:g} req/s, longest {gaps[-1] * 1e3:.0f} ms")  # fmt: skip
    panel.set(
        xlabel="gap between two tokens of an answer, ms (0.1: or less, told together)",
        ylabel="gaps at least as long, %",
        yscale="log",
    )
    panel.set_ylim(60.0 / most, 150)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    log_ms(panel)
    panel.legend(loc="lower left", fontsize=8)
    return figure


def _courses(results: Sequence[RateResult]) -> Figure:
    """Each run over its time: open requests and tokens a second, failures as ticks."""
    figure, panels = plt.subplots(
        len(results), 1, figsize=(10.0, 1.2 + 2.2 * len(results)), layout="constrained", squeeze=False
    )
    for panel, one in zip(panels[:, 0], results, strict=True):
        run = one.run
        outcomes = run.outcomes
        end_s = max((o.ended_s - run.start_s for o in outcomes), default=1.0)
        times = np.array([t - run.start_s for o in outcomes for t in o.answer.token_times_s])
        bins = min(_MOST_BINS, max(_FEWEST_BINS, len(times) // 20))
        bin_s = max(end_s / bins, 1e-3)
        edges = np.arange(0, end_s + bin_s, bin_s)
        per_bin, _ = np.histogram(times, edges)
        panel.stairs(per_bin / bin_s, edges, color=BLUE, linewidth=1.2)
        panel.set_ylabel("tokens/s", color=BLUE)
        panel.set(xlim=(0, end_s), ylim=(0, None))
        beside = panel.twinx()
        beside.spines["right"].set_visible(True)
        moments = sorted(
            [(o.sent_s - run.start_s, 1) for o in outcomes] + [(o.ended_s - run.start_s, -1) for o in outcomes]
        )
        beside.step(
            [s for s, _ in moments], np.cumsum([c for _, c in moments]), where="post", color=ORANGE, linewidth=1
        )
        beside.set_ylabel("open requests", color=ORANGE)
        beside.set_ylim(0, None)
        beside.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        failed = [o.ended_s - run.start_s for o in outcomes if not o.ok]
        panel.plot(failed, [0.03] * len(failed), "|", color=RED, markersize=9, transform=panel.get_xaxis_transform())
        panel.set_title(f"{run.rate:g} req/s" + (f", {len(failed)} failed (ticks)" if failed else ""), fontsize=9)
    panels[-1, 0].set_xlabel("seconds")
    return figure


def _attainment(results: Sequence[RateResult], goodput: Estimate | str) -> Figure:
    figure, panel = plt.subplots(figsize=(7.4, 4.2), layout="constrained")
    panel.axhline(100 * ATTAINED, color="0.75", linewidth=1)
    ordered = sorted(results, key=lambda one: one.run.rate)
    rates, shares = [one.run.rate for one in ordered], [100 * one.attainment for one in ordered]
    if isinstance(goodput, Estimate):
        panel.plot([goodput.low, goodput.high], [100 * ATTAINED] * 2, color=ORANGE, linewidth=5, alpha=0.5,
                   label=f"goodput {goodput.describe()} req/s")  # fmt: skip
        panel.legend(loc="lower left", fontsize=8)
    panel.plot(rates, shares, marker="o", color=BLUE, markersize=5)
    panel.set(xlabel="requests a second", ylabel="scored requests that met their targets, %")
    least = min((share for share in shares if share == share), default=0.0)
    panel.set_ylim(max(0.0, min(least, 90.0) - 5), 101)
    return figure


def _cycle(count: int) -> list[tuple[str, str]]:
    return [_LOOKS[at % len(_LOOKS)] for at in range(count)]
