"""Service-level objectives: what latency a request was promised.

Knows nothing about how the promise is kept. TTFT is the time from arrival to the first token, TPOT the mean
time per output token after the first.
"""

from dataclasses import dataclass

NO_DEADLINE_S = 1e18
"""A deadline that never comes: a finite number, so that snapshots survive JSON."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets of one class of requests. None means best effort."""

    name: str = "default"
    ttft_s: float | None = None
    tpot_s: float | None = None

    def ttft_deadline_s(self, arrival_s: float) -> float:
        """The moment by which the first token is due."""
        return NO_DEADLINE_S if self.ttft_s is None else arrival_s + self.ttft_s
