"""The correction from steps whose neighbours come and go, on a device that is the forecasts times a factor."""

import random

import pytest

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.plan import Lane
from bulletserve.core.snapshot import StepUnderWay
from bulletserve.estimator.estimator import Estimator
from bulletserve.scheduler.step_watch import StepWatch
from tests.estimator.devices import CAPPED, LLAMA_8B, TOTAL, calibration

DECODE = StepShape.decode(64, 64 * 2048, 32)
PREFILL = StepShape.prefill([(2048, 0)], 8, 0)
MIXED = StepShape.mixed([(512, 0)], 64, 64 * 2048, 32, 64)
SPLIT = Partition(100, 32)


@pytest.fixture(scope="module")
def device() -> Estimator:
    return Estimator(calibration(CAPPED), LLAMA_8B)


def test_steps_alone_and_mixed_are_compared_with_their_own_forecast(device: Estimator) -> None:
    watch = StepWatch(device)
    alone = {
        Lane.DECODE: (DECODE, device.predict(DECODE, Partition(0, TOTAL)).seconds),
        Lane.PREFILL: (MIXED, device.predict(MIXED, Partition(TOTAL, 0)).seconds),
    }
    for lane, (shape, seconds) in alone.items():
        for at in range(80):
            watch.ended(lane, shape, TOTAL, at * 1.0, at * 1.0 + 1.2 * seconds, None)
    assert watch.correction == pytest.approx((1.0, 1.2, 1.2), rel=0.01)
    assert watch.errors.prefill == 0.0 < watch.errors.decode < 0.1


@pytest.mark.parametrize("factor", [1.0, 1.2, 0.85])
def test_a_neighbour_that_begins_and_ends_in_between_is_no_error(device: Estimator, factor: float) -> None:
    """Decode runs on; prefill groups come and go at any moment. True times are integrals of the two speeds."""
    rng, watch = random.Random(3), StepWatch(device)
    alone = device.predict(DECODE, SPLIT).seconds * factor
    beside = device.predict(DECODE, SPLIT, PREFILL).seconds * factor
    assert beside > 1.1 * alone
    group_s = device.predict(PREFILL, SPLIT, DECODE).seconds
    now = 0.0
    group_began = rng.uniform(0.0, 0.02)
    for _ in range(300):
        began, done, at = now, 0.0, now
        while done < 1.0:  # from one moment at which a group begins or ends to the next
            running = at >= group_began
            until = group_began + group_s if running else group_began
            rate = 1.0 / (beside if running else alone)
            step_s = min(until - at, (1.0 - done) / rate)
            done, at = done + step_s * rate, at + step_s
            if done < 1.0 - 1e-12:
                if running:
                    watch.ended(Lane.PREFILL, PREFILL, SPLIT.prefill_sms, group_began, at, None)
                    group_began = at + rng.choice((0.0, rng.uniform(0.0, 0.03)))
            else:
                break
        now = at
        current = StepUnderWay(PREFILL, SPLIT.prefill_sms, group_began) if group_began <= now else None
        watch.ended(Lane.DECODE, DECODE, SPLIT.decode_sms, began, now, current)
    assert watch.correction.decode == pytest.approx(factor, rel=0.02)


def test_times_that_are_none_are_no_news(device: Estimator) -> None:
    watch = StepWatch(device)
    watch.ended(Lane.DECODE, DECODE, TOTAL, 1.0, 1.0, None)
    watch.ended(Lane.DECODE, DECODE, TOTAL, 2.0, 1.0, None)
    assert watch.correction == (1.0, 1.0, 1.0) and watch.errors == (0.0, 0.0, 0.0)
