"""Which partitions ran for how long, against the state's own count of both lanes and against the clock."""

from itertools import accumulate
from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulletserve.core.plan import Lane
from bulletserve.telemetry.lanes import LaneTimes, joules_per_token, lane_use
from bulletserve.telemetry.timeline import StepSpan

lengths = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50), st.sampled_from((16, 32, 48))), max_size=12)


def on_lane(kind: str, lane: Lane, steps: list[tuple[int, int, int]]) -> list[StepSpan]:
    """Steps of one lane, one after the other: a pause, a length, SMs."""
    ends = list(accumulate(pause + length for pause, length, _ in steps))
    return [
        StepSpan(kind, (lane,), sms, float(end - length), float(end), 0, 0, "")
        for end, (_, length, sms) in zip(ends, steps, strict=True)
    ]


@given(prefill=lengths, decode=lengths)
def test_shares_are_of_the_whole_time(prefill: list[tuple[int, int, int]], decode: list[tuple[int, int, int]]) -> None:
    spans = on_lane("prefill", Lane.PREFILL, prefill) + on_lane("decode", Lane.DECODE, decode)
    spans.sort(key=lambda span: span.finished_s)
    end_s = max((span.finished_s for span in spans), default=0.0) + 1.0
    times = LaneTimes()
    for span in spans:
        times.observe(span.lanes[0], span.started_s, span.finished_s, False)
    found = lane_use(spans, 0.0, end_s)
    assert sum(found.partitions.values()) == pytest.approx(1.0)
    pairs = {tuple(map(int, name.split("+"))): share for name, share in found.partitions.items() if "+" in name}
    both = sum(share for (one, other), share in pairs.items() if one and other)
    assert both * end_s == pytest.approx(times.both_busy_s)
    of_prefill = sum(share for (one, _), share in pairs.items() if one)
    assert of_prefill * end_s == pytest.approx(sum(length for _, length, _ in prefill))
    assert list(found.partitions.values()) == sorted(found.partitions.values(), reverse=True)


def test_nothing_ran() -> None:
    found = lane_use((), 3.0, 5.0)
    assert isnan(found.mixed_share) and found.switches_per_s == 0.0 and found.partitions == {"idle": 1.0}


def test_energy() -> None:
    assert joules_per_token(600.0, 300.0) == 2.0 and isnan(joules_per_token(float("nan"), 300.0))
    assert isnan(joules_per_token(600.0, 0.0))
