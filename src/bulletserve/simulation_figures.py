"""Pictures of simulated runs: attainment over rate, latencies, what the lanes did.

Knows nothing about how anything was simulated. Needs matplotlib.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bulletserve.core.slo import Slo
from bulletserve.figures import BLUE, GREEN, GREY, KIND_COLOURS, ORANGE, PURPLE, RED, SKY, STYLE, log_ms, save_figure
from bulletserve.simulation import ArmAtRate, Found
from bulletserve.telemetry.goodput import ATTAINED
from bulletserve.telemetry.lanes import lane_use
from bulletserve.telemetry.timeline import StepSpan

_LOOKS = tuple(zip((BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY), "osD^vP*", strict=True))
_STRIP_S = 1.2  # of a run that a strip shows: single steps can be told apart


def draw_all(
    folder: Path, title: str, slo: Slo, runs: Sequence[ArmAtRate], found: Mapping[str, Found], note: str
) -> list[Path]:
    """Write every figure into `folder`, each as SVG and PNG; the paths of the PNGs.

    `found`: searched goodput by policy, empty where none was searched. `note` stands beneath each: what the truth is.
    """
    written: list[Path] = []
    with matplotlib.rc_context(STYLE):
        if found or len({one.rate for one in runs}) > 1:
            written.append(_finish(_attainment(runs, found), folder, "attainment", title, note))
        written.append(_finish(_latencies(runs, slo), folder, "latency", title, note))
        rate = max(one.rate for one in runs)
        shown = [one for one in runs if one.rate == rate and one.spans]
        if shown:
            written.append(_finish(_strips(shown), folder, "lanes", title, note))
    return written


def _finish(figure: Figure, folder: Path, name: str, title: str, note: str) -> Path:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.text(0.01, -0.01, note, ha="left", va="top", fontsize=8, color=GREY)
    return save_figure(figure, folder, name)


def _attainment(runs: Sequence[ArmAtRate], found: Mapping[str, Found]) -> Figure:
    figure, axes = plt.subplots(figsize=(8.4, 4.6), layout="constrained")
    axes.axhline(100 * ATTAINED, color="0.75", linewidth=1)
    least = 100.0 * ATTAINED
    policies = list(dict.fromkeys([*found, *(one.policy for one in runs)]))
    for (colour, marker), policy in zip(_cycle(len(policies)), policies, strict=True):
        points = {one.rate: one.attainment for one in runs if one.policy == policy}
        if policy in found:
            points |= {rate: float(flags.mean()) for rate, flags in found[policy].curve.items()}
        rates = sorted(points)
        least = min(least, *(100 * points[rate] for rate in rates))
        label = policy
        if policy in found:
            goodput = found[policy].goodput
            label += f": {goodput.value:.2f} req/s"
            axes.plot([goodput.low, goodput.high], [100 * ATTAINED] * 2, color=colour, linewidth=5, alpha=0.35)
        axes.plot(rates, [100 * points[rate] for rate in rates], marker=marker, color=colour, markersize=5, label=label)
    axes.set(xlabel="requests a second", ylabel="requests that met both targets, %", ylim=(max(0, least - 5), 101))
    axes.legend(loc="lower left", fontsize=8)
    return figure


def _latencies(runs: Sequence[ArmAtRate], slo: Slo) -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 4.4), layout="constrained", sharey=True)
    rate = max(one.rate for one in runs)
    shown = [one for one in runs if one.rate == rate]
    for (colour, marker), one in zip(_cycle(len(shown)), shown, strict=True):
        tpots = [answer.tpot_s for answer in one.scored if answer.tpot_s is not None]
        for panel, values in zip(panels, ([answer.ttft_s for answer in one.scored], tpots), strict=True):
            ordered = sorted(value * 1e3 for value in values)
            shares = [100 * (at + 1) / len(ordered) for at in range(len(ordered))]
            every = max(1, len(ordered) // 8)
            panel.plot(ordered, shares, color=colour, marker=marker, markevery=every, markersize=5, label=one.policy)
    for panel, name, target_s in (
        (panels[0], "time to first token", slo.ttft_s),
        (panels[1], "time per token", slo.tpot_s),
    ):
        if target_s is not None:
            panel.axvline(target_s * 1e3, color="0.6", linestyle="--", linewidth=1)
        panel.set(xlabel=f"{name}, ms (dashed: the target)" if target_s else f"{name}, ms")
        log_ms(panel)
    panels[0].set(ylabel=f"requests at {rate:g} req/s, %", ylim=(0, 102))
    panels[1].legend(loc="lower right", fontsize=8)
    return figure


def _strips(runs: Sequence[ArmAtRate]) -> Figure:
    """What each lane ran, as high as the SMs that it had: decode from below, prefill from above, mixed all of it."""
    figure, panels = plt.subplots(
        len(runs), 1, figsize=(11.0, 1.2 + 1.7 * len(runs)), layout="constrained", sharex=True, squeeze=False
    )
    began_s = _typical_s(runs)
    for panel, one in zip(panels[:, 0], runs, strict=True):
        total = max(span.sms for span in one.spans)
        for span in one.spans:
            if span.finished_s > began_s and span.started_s < began_s + _STRIP_S:
                _bar(panel, span, total, began_s)
        panel.set(xlim=(0, _STRIP_S), ylim=(0, total), ylabel="SMs")
        panel.set_title(f"{one.policy} at {one.rate:g} req/s, {began_s:.0f} s after the start", fontsize=9)
    panels[-1, 0].set_xlabel("seconds")
    marks = [Patch(color=colour, label=kind) for kind, colour in KIND_COLOURS.items()]
    panels[0, 0].legend(handles=marks, loc="lower right", bbox_to_anchor=(1, 1.0), ncols=3, fontsize=8)
    return figure


def _typical_s(runs: Sequence[ArmAtRate]) -> float:
    """Where a strip begins in which both lanes ran for about as much of the time as in the whole of the runs, between a
    tenth and nine tenths of the shortest."""
    end_s = min(one.spans[-1].finished_s for one in runs)

    def both(from_s: float, to_s: float) -> float:
        return sum(lane_use(one.spans, from_s, to_s).both_share for one in runs)

    usual = both(0.1 * end_s, 0.9 * end_s)
    count = max(1, int(0.8 * end_s / _STRIP_S))
    places_s = [0.1 * end_s + _STRIP_S * at for at in range(count)]
    return min(places_s, key=lambda at_s: abs(both(at_s, at_s + _STRIP_S) - usual))


def _bar(panel: Axes, span: StepSpan, total: int, origin_s: float) -> None:
    bottom = total - span.sms if span.kind == "prefill" else 0
    width_s = span.finished_s - span.started_s
    panel.bar(span.started_s - origin_s, span.sms, width_s, bottom, align="edge", color=KIND_COLOURS[span.kind],
              edgecolor="white", linewidth=0.4)  # fmt: skip


def _cycle(count: int) -> list[tuple[str, str]]:
    return [_LOOKS[at % len(_LOOKS)] for at in range(count)]
