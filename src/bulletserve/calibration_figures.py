"""Pictures of a calibration: how right its forecasts are, what shares, neighbours and power do to a step.

Knows nothing about how anything was measured. Needs matplotlib.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import floor, inf, log10
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.samples import Sample
from bulletserve.estimator.calibration import Calibration
from bulletserve.estimator.errors import GROUPS, group_of
from bulletserve.estimator.estimator import Estimator
from bulletserve.figures import BLUE, GREEN, ORANGE, PURPLE, RED, STYLE, save_figure
from bulletserve.measurements import Measurements

KNEE = 0.9
"""A curve's knee is where it reaches this share of the whole device's speed."""

_ROOM_FOR_A_LEGEND = 1.34
"""Speeds end at about 1; above them a panel names its curves."""


def draw_all(calibration: Calibration, measured: Measurements, folder: Path) -> list[Path]:
    """Write every figure that the samples allow into `folder`, each as SVG and PNG; the paths of the PNGs."""
    makers: dict[str, Callable[[Calibration, Measurements], Figure | None]] = {
        "forecasts": forecasts_figure,
        "scaling": scaling_figure,
        "corun": corun_figure,
        "power": power_figure,
    }
    written: list[Path] = []
    with matplotlib.rc_context(STYLE):
        for name, make in makers.items():
            figure = make(calibration, measured)
            if figure is None:
                continue
            written.append(save_figure(figure, folder, name))
    return written


def title_of(calibration: Calibration) -> str:
    """What all figures are of."""
    shape = calibration.provenance.shape
    model = "" if shape is None else f", {shape.describe()}"
    return f"{calibration.device}, {calibration.total_sms} {unit_of(calibration)}{model}"


def unit_of(calibration: Calibration) -> str:
    """What shares are counted in: only a GPU has a driver."""
    return "SMs" if calibration.provenance.driver or "NVIDIA" in calibration.device else "threads"


def forecasts_figure(calibration: Calibration, measured: Measurements) -> Figure:
    """Forecast against measured time, a panel for each group of steps, coloured by the lane's share."""
    estimator = _estimator(calibration, measured)
    groups = [group for group in GROUPS if any(group_of(s) == group for s in measured.fit + measured.held_out)]
    figure, panels = plt.subplots(2, 2, figsize=(9.2, 8.0), layout="constrained", squeeze=False)
    marks = None
    for panel, group in zip(panels.flat, groups, strict=False):
        found = [(s, held) for part, held in ((measured.fit, False), (measured.held_out, True)) for s in part]
        found = [(sample, held) for sample, held in found if group_of(sample) == group]
        times = [(s.seconds * 1e3, _seconds(estimator, s) * 1e3) for s, _ in found]
        ends = np.array([min(map(min, times)) / 1.3, max(map(max, times)) * 1.3])
        panel.fill_between(ends, ends * 0.9, ends * 1.1, color="0.9", linewidth=0, label="within 10 %")
        panel.plot(ends, ends, color="0.6", linewidth=1)
        for held, marker in ((False, "o"), (True, "D")):
            of_kind = [i for i, (_, is_held) in enumerate(found) if is_held is held]
            x, y = ([times[i][axis] for i in of_kind] for axis in (0, 1))
            shares = [_share(found[i][0], calibration.total_sms) for i in of_kind]
            label = "not fitted (errors in the titles)" if held else "fitted"
            marks = panel.scatter(x, y, c=shares, marker=marker, cmap="cividis", vmin=0, vmax=1, s=34, label=label,
                                  edgecolors="black" if held else "none", linewidths=1.1)  # fmt: skip
        panel.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
        panel.set(xlabel="measured, ms", ylabel="forecast, ms")
        _plain_log_ticks(panel)
        panel.set_title(_panel_title(group, [pair for pair, (_, held) in zip(times, found, strict=True) if held]))
    for panel in list(panels.flat)[len(groups) :]:
        panel.set_visible(False)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    for handle in handles[1:]:
        handle.set_facecolor("0.5")
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    if marks is not None:
        figure.colorbar(marks, ax=panels, label="the step's share of the device", shrink=0.6, format=_percent())
    figure.suptitle(f"How long a step takes, forecast and measured\n{title_of(calibration)}", ha="center", fontsize=11)
    return figure


def scaling_figure(calibration: Calibration, measured: Measurements) -> Figure:
    """Speed of each phase alone over its share, and where more SMs stop paying."""
    estimator, total = _estimator(calibration, measured), calibration.total_sms
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 4.6), layout="constrained", sharey=True)
    counts = np.unique(np.linspace(1, total, min(total, 200)).round().astype(int))
    for panel, kind in zip(panels, ("prefill", "decode"), strict=True):
        alone = [s for s in measured.fit if group_of(s) == f"{kind} alone"]
        looks = zip((BLUE, RED, GREEN), ("o", "s", "^"), (0.03, 0.09, 0.15), strict=True)
        for step, (colour, marker, height) in zip(_curves(alone), looks, strict=False):
            whole = estimator.predict(step, _alone(kind, total)).seconds
            speeds = [whole / estimator.predict(step, _alone(kind, int(sms))).seconds for sms in counts]
            panel.plot(counts, speeds, color=colour, linewidth=1.6, label=_describe(step))
            seen = [(_sms(s), whole / s.seconds) for s in alone if s.step == step]
            panel.plot(*zip(*seen, strict=True), marker, color=colour, markersize=7, markeredgecolor="black")
            knee = int(counts[next(i for i, speed in enumerate(speeds) if speed >= KNEE)])
            panel.plot([knee, knee], [0, KNEE], ":", color=colour, linewidth=1.2)
            panel.annotate(str(knee), (knee, height), (-3, 0), textcoords="offset points", color=colour, ha="right",
                           xycoords=("data", "axes fraction"), va="center",
                           bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
        panel.axhline(KNEE, color="0.75", linewidth=0.8)
        panel.set(xlim=(0, total * 1.03), xlabel=f"{unit_of(calibration)} of the lane")
        panel.set_ylim(0, _ROOM_FOR_A_LEGEND)
        panel.set_yticks(np.arange(0.0, 1.01, 0.2))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.yaxis.set_major_formatter(_percent())
        panel.set_title(f"{kind} alone")
        panel.legend(loc="upper left", fontsize=9)
    panels[0].set_ylabel("speed, share of that on the whole device")
    figure.suptitle(
        f"What a share of the device is worth: lines forecast, marks measured, dotted where {KNEE:.0%} is reached\n"
        f"{title_of(calibration)}",
        ha="center",
        fontsize=11,
    )
    return figure


def corun_figure(calibration: Calibration, measured: Measurements) -> Figure | None:
    """How much slower each lane is beside the other, over the loads of both; None without co-runs."""
    both = [s for s in measured.fit + measured.held_out if s.alongside is not None]
    if not both:
        return None
    estimator = _estimator(calibration, measured)
    splits = _shown([s.partition for s in both])
    pairs = [_pair(s) for s in both]
    layers = both[0].step.layers
    context = round(np.median([rows.decode_context / rows.decode_rows for _, rows in pairs]))
    tokens = np.geomspace(*_ends([prompts.prefill_tokens for prompts, _ in pairs]), 28).tolist()
    rows = np.geomspace(*_ends([rows.decode_rows for _, rows in pairs]), 28).tolist()
    size = max(7.6, 2.6 + 2.9 * len(splits)), 6.6
    figure, panels = plt.subplots(
        2, len(splits), figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    for line, kind in zip(panels, ("decode", "prefill"), strict=True):
        surfaces = [_surface(estimator, kind, split, rows, tokens, context, layers) for split in splits]
        marks = [_slowdowns(estimator, kind, split, both) for split in splits]
        most = max(1.2, *(s.max() for s in surfaces), *(slower for part in marks for _, _, slower in part))
        shade = LogNorm(1.0, most)
        for panel, split, surface, seen in zip(line, splits, surfaces, marks, strict=True):
            mesh = panel.pcolormesh(rows, tokens, surface, norm=shade, cmap="cividis", shading="gouraud")
            mesh.set_rasterized(True)
            for x, y, slower in seen:
                panel.scatter(x, y, c=[slower], norm=shade, cmap="cividis", s=52, edgecolors="white", linewidths=1.3)
            panel.set(xscale="log", yscale="log")
            _plain_log_ticks(panel)
            own = split.decode_sms if kind == "decode" else split.prefill_sms
            other = split.prefill_sms if kind == "decode" else split.decode_sms
            panel.set_title(f"{kind} on {own}, the other lane on {other}")
        ticks = [t for t in (1, 1.1, 1.2, 1.3, 1.5, 2, 3, 5, 10) if t <= most]
        bar = figure.colorbar(mesh, ax=line, label=f"{kind}: times slower than alone", ticks=ticks)
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bar.ax.minorticks_off()
        line[0].set_ylabel("prompt tokens of the batch")
    for panel in panels[-1]:
        panel.set_xlabel("decode rows")
    figure.suptitle(
        f"What the other lane costs: surface forecast (rows of {context} tokens), circles measured\n"
        f"{title_of(calibration)}",
        ha="center",
        fontsize=11,
    )
    return figure


def power_figure(calibration: Calibration, measured: Measurements) -> Figure | None:
    """The clock over the power that the steps would draw at the highest one; None without a power cap or counters."""
    cap, top_mhz = calibration.parameters.power_cap_w, calibration.parameters.top_clock_mhz
    counted = [(s, s.clock_mhz) for s in measured.fitted + measured.held_out if s.watts and s.clock_mhz]
    if cap == inf or not counted:
        return None
    estimator = _estimator(calibration, measured)
    free = _estimator(replace(calibration, parameters=replace(calibration.parameters, power_cap_w=1e9)), measured)
    figure, panel = plt.subplots(figsize=(7.6, 4.8), layout="constrained")
    looks = {"prefill alone": (ORANGE, "s"), "decode alone": (BLUE, "o"), "mixed": (GREEN, "^"),
             "side by side": (PURPLE, "D")}  # fmt: skip
    for group, (colour, marker) in looks.items():
        of_group = [(s, mhz) for s, mhz in counted if group_of(s) == group]
        wanted = [free.predict(s.step, s.partition, s.alongside).watts for s, _ in of_group]
        clocks = [mhz for _, mhz in of_group]
        panel.plot(wanted, clocks, marker, color=colour, markersize=6, markeredgecolor="black", markeredgewidth=0.5,
                   label=group)  # fmt: skip
    wanted = [free.predict(s.step, s.partition, s.alongside).watts for s, _ in counted]
    clocks = [estimator.predict(s.step, s.partition, s.alongside).clock_ratio * top_mhz for s, _ in counted]
    panel.plot(wanted, clocks, "_", color="black", markersize=11, markeredgewidth=1.3, zorder=0, label="forecast")
    panel.vlines(wanted, clocks, [mhz for _, mhz in counted], color="0.7", linewidth=0.8, zorder=0)
    panel.axvline(cap, color=RED, linestyle="--", linewidth=1.2)
    panel.annotate(f"cap {cap:.0f} W", (cap, 1.0), (4, -10), xycoords=("data", "axes fraction"),
                   textcoords="offset points", color=RED)  # fmt: skip
    panel.set(xlabel="power that the steps would draw at the highest clock, W (forecast)", ylabel="clock, MHz")
    panel.set_ylim(min(*clocks, *(mhz for _, mhz in counted)) * 0.9, top_mhz * 1.05)
    panel.legend(loc="lower left")
    figure.suptitle(f"Past the power cap the clock falls\n{title_of(calibration)}", ha="center", fontsize=11)
    return figure


def _estimator(calibration: Calibration, measured: Measurements) -> Estimator:
    return Estimator(calibration, measured.shape, measured.dtype_bytes)


def _seconds(estimator: Estimator, sample: Sample) -> float:
    return estimator.predict(sample.step, sample.partition, sample.alongside).seconds


def _sms(sample: Sample) -> int:
    """SMs of the sample's own lane."""
    return sample.partition.decode_sms if sample.step.kind == "decode" else sample.partition.prefill_sms


def _share(sample: Sample, total_sms: int) -> float:
    return min(1.0, _sms(sample) / total_sms)


def _alone(kind: str, sms: int) -> Partition:
    return Partition(0, sms) if kind == "decode" else Partition(sms, 0)


def _panel_title(group: str, held_out: Sequence[tuple[float, float]]) -> str:
    if not held_out:
        return group
    errors = [abs(forecast / seen - 1) for seen, forecast in held_out]
    return f"{group}: median error {np.median(errors):.1%} ({len(errors)} points)"


def _curves(alone: Sequence[Sample]) -> Iterator[StepShape]:
    """Up to three loads to draw: the one measured on the most shares, then the least and the most work."""
    shares: dict[StepShape, set[int]] = {}
    for sample in alone:
        shares.setdefault(sample.step, set()).add(_sms(sample))
    if not shares:
        return
    first = max(shares, key=lambda step: len(shares[step]))
    yield first
    rest = sorted((s for s in shares if s != first), key=lambda s: (s.decode_context, s.rows))
    yield from rest[:1] + rest[1:][-1:]


def _describe(step: StepShape) -> str:
    if step.kind == "decode":
        rows = f"{step.decode_rows} row{'s' if step.decode_rows > 1 else ''}"
        return f"{rows} of {round(step.decode_context / step.decode_rows)} tokens"
    before = step.prefill_context - step.prefill_tokens
    return f"{step.prefill_tokens} tokens" + (f" after {before}" if before else "")


def _pair(sample: Sample) -> tuple[StepShape, StepShape]:
    """What the prefill lane and the decode lane run."""
    assert sample.alongside is not None
    steps = (sample.step, sample.alongside)
    return steps if sample.step.kind == "prefill" else steps[::-1]


def _shown(measured: Sequence[Partition]) -> list[Partition]:
    """At most three of the splits: the outermost, and between them the one that was measured most often."""
    times = Counter(measured)
    splits = sorted(times, key=lambda split: split.decode_sms)
    if len(splits) <= 2:
        return splits
    return [splits[0], max(splits[1:-1], key=times.__getitem__), splits[-1]]


def _ends(values: Sequence[int]) -> tuple[float, float]:
    """A range for an axis that holds all values, never empty."""
    return min(values) * 0.7, max(values) * 1.4


def _surface(
    estimator: Estimator,
    kind: str,
    split: Partition,
    rows: Sequence[float],
    tokens: Sequence[float],
    context: int,
    layers: int,
) -> np.ndarray:
    """Times slower than alone on the same share, [tokens, rows]."""
    values = np.ones((len(tokens), len(rows)))
    for i, new in enumerate(tokens):
        prefill = StepShape.prefill([(max(1, round(new)), 0)], layers, 1)
        for j, count in enumerate(rows):
            decode = StepShape.decode(max(1, round(count)), max(1, round(count)) * context, layers)
            step, beside = (decode, prefill) if kind == "decode" else (prefill, decode)
            together = estimator.predict(step, split, beside).seconds
            values[i, j] = max(1.0, together / estimator.predict(step, split).seconds)
    return values


def _slowdowns(
    estimator: Estimator, kind: str, split: Partition, both: Sequence[Sample]
) -> list[tuple[int, int, float]]:
    """(rows, tokens, times slower than the forecast alone) of the measured co-runs."""
    found: list[tuple[int, int, float]] = []
    for sample in both:
        if sample.partition == split and sample.step.kind == kind:
            prefill, decode = _pair(sample)
            slower = sample.seconds / estimator.predict(sample.step, split).seconds
            found.append((decode.decode_rows, prefill.prefill_tokens, max(1.0, slower)))
    return found


def _plain_log_ticks(panel: Axes) -> None:
    """1, 10, 100 instead of powers; numbers at 2 and 5 as well where an axis spans little."""
    for axis, ends in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, panel.get_ylim())):
        wide = ends[1] / ends[0] > 50
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        leading = (1,) if wide else (1, 2, 5)
        axis.set_minor_formatter(
            FuncFormatter(lambda value, _, leading=leading: f"{value:g}" if _leading(value) in leading[1:] else "")
        )


def _leading(value: float) -> float:
    return round(value / 10.0 ** floor(log10(value) + 1e-9), 6)


def _percent() -> FuncFormatter:
    return FuncFormatter(lambda value, _: f"{value:.0%}")
