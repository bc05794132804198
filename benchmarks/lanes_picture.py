"""The picture of the README: what each lane did while the demo's requests were served, under three policies.

Every bar is a step as the engine ran it; the marks below are the tokens of the first request as they were told.
Usage: python benchmarks/lanes_picture.py [--out docs/lanes.svg]
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import itertools

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bulletserve.commands.compare import timed_prompts
from bulletserve.comparison import ArmRun, run_arm
from bulletserve.compose import build_engine
from bulletserve.core.config import EngineConfig
from bulletserve.core.events import Event, StepDone
from bulletserve.core.plan import DecodeStep, Lane, MixedStep, Plan

POLICIES = ("time_sliced", "chunked_prefill", "static_split")
COLOURS = {"prefill": "#d95f02", "decode": "#1b9e77", "mixed": "#7570b3"}
STREAM = 0
"""The request whose tokens are marked."""


@dataclass
class Recorder:
    """An observer of the loop: every step with its kind and times."""

    kinds: list[str] = field(default_factory=list)
    bars: list[tuple[Lane, str, float, float]] = field(default_factory=list)

    def __call__(self, now_s: float, events: Sequence[Event], plans: Sequence[Plan]) -> None:
        del now_s
        for event in events:
            if isinstance(event, StepDone):
                kind = self.kinds[event.step_id]
                lane = Lane.DECODE if kind == "decode" else Lane.PREFILL
                self.bars.append((lane, kind, event.started_s, event.finished_s))
        for plan in plans:
            for start in plan.starts:
                decode = isinstance(start, DecodeStep)
                self.kinds.append("decode" if decode else "mixed" if isinstance(start, MixedStep) else "prefill")


def draw(axes: Axes, recorder: Recorder, run: ArmRun, until_s: float) -> None:
    """One policy's strip."""
    height = {Lane.PREFILL: 2.0, Lane.DECODE: 1.0}
    for lane, kind, start_s, end_s in recorder.bars:
        start_s, end_s = start_s - run.start_s, end_s - run.start_s
        axes.barh(height[lane], end_s - start_s, left=start_s, height=0.8, color=COLOURS[kind], linewidth=0)
    times_s = [time_s - run.start_s for time_s in run.token_times_s[STREAM]]
    axes.plot(times_s, [0.2] * len(times_s), "|", color="black", markersize=7, markeredgewidth=0.8)
    gap_s = max(b - a for a, b in itertools.pairwise(times_s))
    axes.set_title(
        f"{run.policy}: longest gap of the first stream {gap_s * 1e3:.0f} ms, {run.summary.tokens_per_s:.0f} tokens/s",
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
    strips: list[tuple[Recorder, ArmRun]] = []
    for policy in POLICIES:
        run_arm(engine, policy, prompts[:2])
        recorder = Recorder()
        strips.append((recorder, run_arm(engine, policy, prompts, recorder)))
    engine.close()
    until_s = max(times[-1] - run.start_s for _, run in strips for times in run.token_times_s)
    figure, rows = plt.subplots(len(strips), 1, figsize=(9, 5.4), sharex=True, layout="constrained")
    for axes, (recorder, run) in zip(rows, strips, strict=True):
        draw(axes, recorder, run, until_s)
    rows[-1].set_xlabel("seconds since the first request", fontsize=8)
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(patches, COLOURS, loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    figure.savefig(options.out, metadata={"Date": None})
    figure.savefig(options.out.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
