"""What each step that ended says about its forecast: fed by the state, it keeps the correction that snapshots carry.

Knows nothing about requests or plans. A step's neighbour may change while it runs. Each part of its time is compared
with the forecast beside the neighbour of that part: in t_i of T_i seconds it does t_i / T_i of its work, so it should
have taken the sum of t_i over the sum of t_i / T_i. A step counts as one beside another if that ran for most of it.
"""

from collections import deque
from typing import NamedTuple

from bulletserve.core.correction import Correction
from bulletserve.core.operators import Kind, StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.plan import Lane
from bulletserve.core.snapshot import StepUnderWay
from bulletserve.estimator.correction import Corrector
from bulletserve.scheduler.policy import Forecaster

_LEAST_PART = 0.02
"""A neighbour of less than this share of a step's time is left out."""

_KEPT = 64
"""Steps of a lane that are kept after their end: no step of the other lane outlasts so many."""


class _Ran(NamedTuple):
    shape: StepShape
    sms: int
    began_s: float
    ended_s: float


class StepWatch:
    """Compares steps with forecasts, which have no correction in them. One thread."""

    def __init__(self, estimator: Forecaster) -> None:
        self._estimator = estimator
        self._corrector = Corrector()
        self._ended: dict[Lane, deque[_Ran]] = {lane: deque(maxlen=_KEPT) for lane in Lane}

    @property
    def correction(self) -> Correction:
        """The factors to plan with: the same object until they change."""
        return self._corrector.published

    @property
    def errors(self) -> Correction:
        """By kind of step, the mean |observed / corrected forecast - 1| of late."""
        return self._corrector.errors

    @property
    def mean_errors(self) -> dict[Kind, float]:
        """By kind of step, the mean of the same over all steps."""
        return self._corrector.mean_errors

    def ended(
        self, lane: Lane, shape: StepShape, sms: int, began_s: float, ended_s: float, beside: StepUnderWay | None
    ) -> None:
        """A step of `lane` ran on `sms` from `began_s` to `ended_s`; `beside` is what the other lane now runs."""
        others = self._ended[Lane.DECODE if lane is Lane.PREFILL else Lane.PREFILL]
        self._ended[lane].append(_Ran(shape, sms, began_s, ended_s))
        seconds = ended_s - began_s
        if seconds <= 0.0:
            return
        alone_s, done = seconds, 0.0
        if shape.kind != "mixed":
            parts = []
            for ran in reversed(others):
                if ran.ended_s <= began_s:
                    break
                parts.append((ran.shape, ran.sms, min(ended_s, ran.ended_s) - max(began_s, ran.began_s)))
            if beside is not None:
                parts.append((beside.shape, beside.sms, ended_s - max(began_s, beside.since_s)))
            for other, other_sms, part_s in parts:
                if part_s > _LEAST_PART * seconds and other.kind not in (shape.kind, "mixed"):
                    both = Partition(sms, other_sms) if lane is Lane.PREFILL else Partition(other_sms, sms)
                    done += part_s / self._estimator.predict(shape, both, other).seconds
                    alone_s -= part_s
        if alone_s > _LEAST_PART * seconds:
            done += alone_s / self._estimator.predict(shape, Partition(sms, sms)).seconds
        if done > 0.0:
            self._corrector.observe(shape.kind, seconds / done, seconds, beside=alone_s < 0.5 * seconds)
