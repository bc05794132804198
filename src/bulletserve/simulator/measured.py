"""A device that takes exactly as long as was measured, where something was measured.

Knows nothing about queues or time. Between the measured points it keeps the calibration's shape: the logarithm of
measured over forecast, which is what the physics cannot explain, is carried from each point to its surroundings and
fades with the distance (in logarithms of counts and SMs), among points of the same kind of step only.
"""

from collections.abc import Iterable
from math import exp, log, log1p

from bulletserve.core.operators import StepShape
from bulletserve.core.samples import Sample
from bulletserve.estimator.estimator import shares
from bulletserve.simulator.truth import Pace, Truth

_REACH = 0.7  # the distance, as a logarithm, at which a point's word counts as much as the calibration's
_SAME = 1e-9

_Place = tuple[float, ...]


class MeasuredTruth:
    """`truth` (the calibration's own physics) corrected by measured samples. See `simulator/truth.Truth`."""

    def __init__(self, truth: Truth, samples: Iterable[Sample]) -> None:
        self.total_sms, self.idle_w, self.power_cap_w = truth.total_sms, truth.idle_w, truth.power_cap_w
        self._truth = truth
        self._points: dict[str, list[tuple[_Place, float]]] = {}
        self._memo: dict[tuple[StepShape, int, StepShape | None, int], Pace] = {}
        for one in samples:
            sms, other_sms = (round(n) for n in shares(one.step, one.partition, one.alongside, self.total_sms))
            model_s = self._model(one.step, sms, one.alongside, other_sms).steady_s
            place = _place(one.step, sms, one.alongside, other_sms)
            self._points.setdefault(_group(one.step, one.alongside), []).append((place, log(one.seconds / model_s)))

    def alone(self, step: StepShape, sms: int) -> Pace:
        """See `Truth`."""
        return self._pace(step, sms, None, 0)

    def beside(self, step: StepShape, sms: int, other: StepShape, other_sms: int) -> Pace:
        """See `Truth`."""
        return self._pace(step, sms, other, other_sms)

    def _pace(self, step: StepShape, sms: int, other: StepShape | None, other_sms: int) -> Pace:
        key = step, sms, other, other_sms
        found = self._memo.get(key)
        if found is None:
            if len(self._memo) >= 1 << 16:
                self._memo.clear()
            off = exp(self._residual(_group(step, other), _place(*key)))
            model = self._model(*key)
            found = self._memo[key] = Pace(model.steady_s * off, model.top_s * off, model.asked_w)
        return found

    def _model(self, step: StepShape, sms: int, other: StepShape | None, other_sms: int) -> Pace:
        if other is None:
            return self._truth.alone(step, sms)
        return self._truth.beside(step, sms, other, other_sms)

    def _residual(self, group: str, place: _Place) -> float:
        total, weights = 0.0, _REACH**-2
        for point, residual in self._points.get(group, ()):
            apart = sum((a - b) ** 2 for a, b in zip(point, place, strict=True))
            weight = 1.0 / (apart + _SAME)
            total += weight * residual
            weights += weight
        return total / weights


def _group(step: StepShape, other: StepShape | None) -> str:
    return f"{step.kind} {'alone' if other is None else 'beside'}"


def _place(step: StepShape, sms: int, other: StepShape | None, other_sms: int) -> _Place:
    """Counts do not say how many layers a step has: a group of layers is off by as much as the whole."""
    return (*_counts(step), log(sms), *(() if other is None else (*_counts(other), log(other_sms))))


def _counts(step: StepShape) -> _Place:
    if not step.decode_rows:
        return log(step.prefill_tokens), log(step.prefill_pairs)
    decode = log(step.decode_rows), log(step.decode_context)
    return decode if not step.prefill_tokens else (*decode, log1p(step.prefill_tokens), log1p(step.prefill_pairs))
