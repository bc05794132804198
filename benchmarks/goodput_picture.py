"""The picture of docs/benchmarks.md: simulated goodput of every cell, from the JSON that `goodput_simulated.py` wrote.

    python benchmarks/goodput_picture.py [--out docs/goodput.svg]

Bars are the geometric mean over seeds with its 95 % interval. Chunked prefill has the budget that is best in the cell.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

DOCUMENT = Path(__file__).parent / "results" / "goodput_simulated.json"
WORKLOADS = ("azure_code", "azure_conv", "arxiv_sum", "long_context")
TIERS = ("loose", "middle", "tight")
BUDGETS = (256, 512, 1024, 2048, 8192)
EQUAL = "_ordering_slack_admission_triage"
ARMS = {
    "chunked prefill": ("#7570b3", [f"chunked_prefill_budget_{budget}" for budget in BUDGETS]),
    "chunked prefill, bullet's ordering and admission": (
        "#b3b0d6",
        [f"chunked_prefill_budget_{budget}{EQUAL}" for budget in BUDGETS],
    ),
    "bullet": ("#1b9e77", ["bullet"]),
}


def draw(axes: Axes, workload: str, metrics: dict[str, float]) -> None:
    """One workload: three tiers, a bar for each arm."""
    width = 0.8 / len(ARMS)
    for place, (label, (colour, names)) in enumerate(ARMS.items()):
        for at, tier in enumerate(TIERS):
            cell = f"goodput_{workload}_{tier}"
            known = [name for name in names if f"{cell}_{name}_req_s" in metrics]
            best = max(known, key=lambda name: metrics[f"{cell}_{name}_req_s"])
            value, low, high = (metrics[f"{cell}_{best}{bound}_req_s"] for bound in ("", "_low", "_high"))
            x = at + (place - 1) * width
            axes.bar(x, value, width * 0.92, color=colour, label=label if at == 0 else None, linewidth=0)
            axes.plot([x, x], [low, high], color="black", linewidth=0.8)
            if len(names) > 1:
                budget = best.removesuffix(EQUAL).rsplit("_", 1)[1]
                axes.text(x, 0.02 * axes.get_ylim()[1], budget, ha="center", va="bottom", fontsize=6, rotation=90)
    axes.set_xticks(range(len(TIERS)), TIERS)
    axes.set_title(workload.replace("_", "-"), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/goodput.svg"))
    options = parser.parse_args()
    metrics: dict[str, float] = json.loads(DOCUMENT.read_text())["metrics"]
    plt.rcParams["svg.hashsalt"] = "goodput"
    figure, row = plt.subplots(1, len(WORKLOADS), figsize=(10, 3.2))
    for axes, workload in zip(row, WORKLOADS, strict=True):
        draw(axes, workload, metrics)
    row[0].set_ylabel("goodput, requests a second")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(ARMS), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(options.out, metadata={"Date": None} if options.out.suffix == ".svg" else None)
    print("wrote", options.out)


if __name__ == "__main__":
    main()
