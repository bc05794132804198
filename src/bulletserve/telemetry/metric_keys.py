"""How the figures of a run are called in a result: flat keys that end in their unit.

Knows nothing about who ran what: names go in as texts. `results` writes the document.
"""

from dataclasses import asdict

from bulletserve.telemetry.goodput import Estimate
from bulletserve.telemetry.latency import Summary


def key_part(text: str) -> str:
    """A text as a part of a key."""
    return "".join(letter if letter.isalnum() else "_" for letter in text)


def summary_metrics(summary: Summary) -> dict[str, float]:
    """The figures of a summary: latencies in milliseconds, output tokens a second."""
    latencies = {name: value for name, value in asdict(summary).items() if name.endswith("_s")}
    tokens_per_s = latencies.pop("tokens_per_s")
    return {f"{name.removesuffix('_s')}_ms": seconds * 1e3 for name, seconds in latencies.items()} | {
        "tok_s": tokens_per_s
    }


def run_metrics(key: str, attainment: float, summary: Summary) -> dict[str, float]:
    """The figures of one run at one rate, and its `attainment`."""
    return {f"{key}_met_x": attainment} | {f"{key}_{name}": value for name, value in summary_metrics(summary).items()}


def estimate_metrics(key: str, found: Estimate, unit: str) -> dict[str, float]:
    """An estimate and the ends of its interval."""
    return {f"{key}_{unit}": found.value, f"{key}_low_{unit}": found.low, f"{key}_high_{unit}": found.high}
