"""A script's figures while they are being found: one JSON document, kept up to date, and a short table for people.

Knows nothing about what is measured.
"""

from math import isfinite
from pathlib import Path

from benchmarks.record import record


class Report:
    """The figures of benchmark `name`. A figure that is no finite number is left out of the document."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.metrics: dict[str, float] = {}
        self._folder = folder

    def add(self, **metrics: float) -> None:
        """Note figures; their names end in their unit. The document is written anew: what is known survives a kill."""
        self.metrics |= {name: value for name, value in metrics.items() if isfinite(value)}
        if self.metrics:
            record(self.name, self.metrics, folder=self._folder)

    def line(self, label: str, *cells: str | float) -> None:
        """Print a line of the table: numbers short, texts as they are."""
        print(f"{label:<20}", *(_cell(cell) for cell in cells), sep="  ", flush=True)


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return f"{value:>8}"
    text = "-" if not isfinite(value) else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return f"{text:>8}"
