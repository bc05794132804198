"""How far a load generator can be believed: the definitions of its own lag, in one place.

Knows nothing about sockets or servers. A client that sends late or sleeps over arriving tokens measures itself.

- due: the moment at which the list of requests says that one arrives. All latencies count from it, so that whatever a
  client loses by being late is in them and never hidden.
- late: sent minus due, of each request that was sent.
- loop lag: how much later than asked the client's event loop was back from a short sleep, again and again. A token's
  time is the moment at which the loop saw it, so it is too late by up to this much.
- processor share: processor time of the whole client over the time of the run; near 1 it has none to spare.
- sent rate: (requests sent - 1) / (last sent - first sent).
- kept up: p99 of late and p99 of the loop lag are at most a bound. Where all arrive at once only the loop lag counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf

from bulletserve.telemetry.latency import quantile

BOUND_S = 0.010
"""The bound by default: half of the gap between two tokens that people ask for."""


@dataclass(frozen=True, slots=True)
class ClientLag:
    """One run's figures; nan where there was nothing to measure. `asked_rate` is infinite for all at once."""

    asked_rate: float
    sent_rate: float
    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    loop_p50_s: float
    loop_p99_s: float
    loop_max_s: float
    processor_share: float

    def trouble(self, bound_s: float = BOUND_S) -> str | None:
        """What shows that the client did not keep up, in words; None if it did."""
        found = []
        if not isinf(self.asked_rate) and self.late_p99_s > bound_s:
            found.append(f"a hundredth of the requests left more than {self.late_p99_s * 1e3:.1f} ms late")
        if self.loop_p99_s > bound_s:
            found.append(f"its event loop was more than {self.loop_p99_s * 1e3:.1f} ms late a hundredth of the time")
        if not found:
            return None
        return (
            f"{' and '.join(found)} (at most {bound_s * 1e3:g} ms is allowed; it took {self.processor_share:.0%} "
            "of a core)"
        )


def client_lag(
    asked_rate: float,
    due_s: Sequence[float],
    sent_s: Sequence[float],
    loop_lags_s: Sequence[float],
    processor_share: float,
) -> ClientLag:
    """The figures of one run. `due_s` and `sent_s` are of the same requests, those that were sent, on one clock."""
    late_s = [max(0.0, sent - due) for due, sent in zip(due_s, sent_s, strict=True)]
    span_s = max(sent_s) - min(sent_s) if sent_s else 0.0
    nan = float("nan")
    return ClientLag(
        asked_rate,
        (len(sent_s) - 1) / span_s if span_s else nan,
        quantile(late_s, 0.5),
        quantile(late_s, 0.99),
        max(late_s, default=nan),
        quantile(loop_lags_s, 0.5),
        quantile(loop_lags_s, 0.99),
        max(loop_lags_s, default=nan),
        processor_share,
    )
