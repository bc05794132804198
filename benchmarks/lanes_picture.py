"""The picture of the README: what each lane did while the demo's requests were served, under three policies.

Every bar is a step as the engine ran it; the marks below are the tokens of the first request as they were told.
Usage: python benchmarks/lanes_picture.py [--out docs/lanes.svg]
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import itertools

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from bulletserve.commands.compare_requests import timed_prompts
from bulletserve.comparison.arm_run import ArmRun, run_arm
from bulletserve.compose import build_engine
from bulletserve.core.config import EngineConfig
from bulletserve.core.plan import Lane
from bulletserve.telemetry.latency import summarise

POLICIES = ("time_sliced", "chunked_prefill", "static_split")
COLOURS = {"prefill": "#d95f02", "decode": "#1b9e77", "mixed": "#7570b3"}
STREAM = 0
"""The request whose tokens are marked."""


def draw(axes: Axes, run: ArmRun, until_s: float) -> None:
    """One policy's strip."""
    height = {Lane.PREFILL: 2.0, Lane.DECODE: 1.0}
    for span in run.spans:
        start_s, end_s = span.started_s - run.start_s, span.finished_s - run.start_s
        place = height[span.lanes[0]]
        axes.barh(place, end_s - start_s, left=start_s, height=0.8, color=COLOURS[span.kind], linewidth=0)
    times_s = [time_s - run.start_s for time_s in run.answers[STREAM].token_times_s]
    axes.plot(times_s, [0.2] * len(times_s), "|", color="black", markersize=7, markeredgewidth=0.8)
    gap_s = max(b - a for a, b in itertools.pairwise(times_s))
    tokens_per_s = summarise(run.answers).tokens_per_s
    axes.set_title(
        f"{run.policy}: longest gap of the first stream {gap_s * 1e3:.0f} ms, {tokens_per_s:.0f} tokens/s",
        loc="left",
        fontsize=9,
    )
    axes.set_yticks([2.0, 1.0, 0.2], ["prefill or mixed", "decode", "the first stream's tokens"], fontsize=8)
    axes.set_xlim(0, until_s)
    axes.set_ylim(-0.2, 2.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def main() -> None:
    """Serve, record, draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("docs/lanes.svg"))
    parser.add_argument("--prompts", type=Path, default=Path("examples/demo_requests.jsonl"))
    options = parser.parse_args()
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bullet"})
    engine = build_engine(EngineConfig())
    prompts = timed_prompts(options.prompts, engine)
    strips: list[ArmRun] = []
    for policy in POLICIES:
        run_arm(engine, policy, prompts[:2])
        strips.append(run_arm(engine, policy, prompts))
    engine.close()
    until_s = max(answer.token_times_s[-1] - run.start_s for run in strips for answer in run.answers)
    figure, rows = plt.subplots(len(strips), 1, figsize=(9, 5.4), sharex=True, layout="constrained")
    for axes, run in zip(rows, strips, strict=True):
        draw(axes, run, until_s)
    rows[-1].set_xlabel("seconds since the first request", fontsize=8)
    patches = [Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(patches, COLOURS, loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    figure.savefig(options.out, metadata={"Date": None})
    figure.savefig(options.out.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
