"""The client's own lag, computed by hand."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.telemetry.client_lag import client_lag
from bulletserve.telemetry.latency import quantile


def test_by_hand() -> None:
    lag = client_lag(2.0, [0.0, 1.0, 2.0], [0.5, 1.0, 2.5], [0.0, 0.004], 0.25)
    assert (lag.late_p50_s, lag.late_max_s) == (0.5, 0.5)
    assert lag.sent_rate == 1.0 and lag.asked_rate == 2.0
    assert (lag.loop_p50_s, lag.loop_max_s, lag.processor_share) == (0.002, 0.004, 0.25)
    assert "500.0 ms late" in (lag.trouble(0.1) or "")
    assert lag.trouble(0.6) is None


def test_nothing_sent_is_no_number_and_no_trouble() -> None:
    lag = client_lag(2.0, [], [], [], 0.0)
    assert math.isnan(lag.late_p99_s) and math.isnan(lag.sent_rate) and lag.trouble() is None


@given(late=st.lists(st.floats(0, 1), min_size=1, max_size=50), loop=st.lists(st.floats(0, 1), min_size=1))
@settings(max_examples=100, deadline=None)
def test_trouble_is_exactly_a_p99_above_the_bound(late: list[float], loop: list[float]) -> None:
    due = [float(n) for n in range(len(late))]
    lag = client_lag(1.0, due, [d + one for d, one in zip(due, late, strict=True)], loop, 0.1)
    sent_late = [d + one - d for d, one in zip(due, late, strict=True)]
    worst = max(quantile(sent_late, 0.99), quantile(loop, 0.99))
    assert (lag.trouble(0.3) is not None) == (worst > 0.3)
