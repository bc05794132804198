"""What all pictures share, and what they show of the lanes."""

import matplotlib.pyplot as plt
import pytest

from bulletserve.core.plan import Lane
from bulletserve.figures import log_ms
from bulletserve.telemetry.lanes import lane_use
from bulletserve.telemetry.timeline import StepSpan


@pytest.mark.parametrize(("low", "high"), [(7.0, 14.0), (4.0, 60.0), (15.0, 5000.0), (0.1, 20_000.0)])
def test_a_logarithmic_axis_has_some_labels_and_not_too_many(low: float, high: float) -> None:
    figure, panel = plt.subplots()
    panel.plot([low, high], [0, 1])
    log_ms(panel)
    figure.canvas.draw()
    labels = [label.get_text() for label in panel.get_xticklabels() if low <= label.get_position()[0] <= high]
    plt.close(figure)
    assert 3 <= len(labels) <= 9 and all(float(label) for label in labels)


def test_the_times_in_which_both_lanes_ran() -> None:
    spans = [
        StepSpan(kind, (Lane.PREFILL if kind == "prefill" else Lane.DECODE,), 1, float(began), float(ended), 0, 0, "")
        for kind, began, ended in (
            ("decode", 0, 2), ("prefill", 1, 5), ("decode", 2, 3), ("mixed", 5, 6), ("prefill", 6, 7), ("decode", 6, 8)
        )
    ]  # fmt: skip
    shares = [lane_use(spans, began_s, began_s + 1.0).both_share for began_s in range(8)]
    assert shares == [0, 1, 1, 0, 0, 0, 1, 0]
