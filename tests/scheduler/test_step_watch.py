"""The correction from steps whose neighbours come and go, on a device that is the forecasts times a factor."""

import random

import pytest

from bulletserve.core.correction import NO_CORRECTION, NO_ERRORS
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
    assert watch.correction == pytest.approx((1.0, 1.2, 1.2, 1.0, 1.0), rel=0.01)
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
    assert watch.correction.decode_beside == pytest.approx(factor, rel=0.02)


def test_a_group_beside_several_decode_steps_is_compared_with_all_of_them(device: Estimator) -> None:
    watch = StepWatch(device)
    prefill = device.predict(PREFILL, SPLIT, DECODE).seconds
    for turn in range(60):
        at, part = turn * 1.0, prefill / 4
        for number in range(4):
            watch.ended(Lane.DECODE, DECODE, SPLIT.decode_sms, at + number * part, at + (number + 1) * part, None)
        watch.ended(Lane.PREFILL, PREFILL, SPLIT.prefill_sms, at, at + prefill, None)
    assert watch.errors.prefill_beside < 1e-6 and watch.errors.prefill == 0.0
    assert watch.correction.prefill_beside == 1.0


def test_steps_beside_another_have_a_correction_of_their_own(device: Estimator) -> None:
    watch = StepWatch(device)
    alone = device.predict(DECODE, Partition(SPLIT.decode_sms, SPLIT.decode_sms)).seconds
    beside = device.predict(DECODE, SPLIT, PREFILL).seconds
    for turn in range(120):
        at = turn * 1.0
        watch.ended(Lane.DECODE, DECODE, SPLIT.decode_sms, at, at + alone, None)
        current = StepUnderWay(PREFILL, SPLIT.prefill_sms, at + 0.5)
        watch.ended(Lane.DECODE, DECODE, SPLIT.decode_sms, at + 0.5, at + 0.5 + 1.2 * beside, current)
    assert watch.correction.decode == 1.0
    assert watch.correction.decode_beside == pytest.approx(1.2, rel=0.01)


def test_times_that_are_none_are_no_news(device: Estimator) -> None:
    watch = StepWatch(device)
    watch.ended(Lane.DECODE, DECODE, TOTAL, 1.0, 1.0, None)
    watch.ended(Lane.DECODE, DECODE, TOTAL, 2.0, 1.0, None)
    assert watch.correction == NO_CORRECTION and watch.errors == NO_ERRORS
