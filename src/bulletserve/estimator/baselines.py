"""What the model is compared with, fitted to the same samples: a plain roofline, and a linear regression.

Knows nothing about contention or power, which is the point. The roofline has three constants: operators take the
greater of flops at a rate per SM and bytes at a rate of the device, a layer takes its launch. The regression is one set
of weights for each group of samples over counts and counts per SM, as one would make without any physics. Both are
fitted to relative errors. For reports only, so numpy and scipy are welcome here.
"""

from collections.abc import Callable, Sequence
from math import exp, log

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from bulletserve.core.operators import operators
from bulletserve.core.samples import Sample
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.errors import Predictor, group_of
from bulletserve.estimator.estimator import shares

Vector = NDArray[np.float64]

_RIDGE = 1e-3  # of a weight whose feature has the size 1, for groups with fewer samples than features


def roofline(samples: Sequence[Sample], total_sms: int, shape: ModelShape, dtype_bytes: int = 2) -> Predictor:
    """Fitted to the samples without a neighbour; seconds of any sample, whatever runs beside it."""

    def seconds(sample: Sample, constants: Sequence[float]) -> float:
        per_sm, device_bytes, layer_s = constants
        sms, _ = shares(sample.step, sample.partition, sample.alongside, total_sms)
        total = sample.step.layers * layer_s
        for each in operators(shape, sample.step, dtype_bytes):
            total += each.count * max(each.flops / (per_sm * sms), each.bytes / device_bytes)
        return total

    alone = [sample for sample in samples if sample.alongside is None]
    work = [(sum(e.flops * e.count for e in operators(shape, s.step, dtype_bytes)), s.seconds) for s in alone]
    moved = [sum(e.bytes * e.count for e in operators(shape, s.step, dtype_bytes)) / s.seconds for s in alone]
    first = [max(flops / time for flops, time in work) / total_sms, max(moved), 1e-5]

    def residuals(x: Vector) -> list[float]:
        constants = [exp(value) for value in x]
        return [log(seconds(sample, constants) / sample.seconds) for sample in alone]

    found = least_squares(residuals, np.log(first), loss="soft_l1", f_scale=0.05)
    constants = [exp(value) for value in found.x]
    return lambda sample: seconds(sample, constants)


def linear_regression(samples: Sequence[Sample], total_sms: int) -> Predictor:
    """One regression for each group of samples (the lanes side by side apart), on counts and counts per SM.

    A group that has no sample goes by a regression over all of them.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(_regression_of(sample), []).append(sample)
    fitted = {group: _regress(found, total_sms) for group, found in groups.items()}
    unknown = _regress(samples, total_sms)
    return lambda sample: fitted.get(_regression_of(sample), unknown)(sample)


def _regression_of(sample: Sample) -> str:
    return f"{group_of(sample)} {sample.step.kind}"


def _regress(samples: Sequence[Sample], total_sms: int) -> Callable[[Sample], float]:
    table = np.array([_features(sample, total_sms) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    scale = np.maximum(np.abs(table).max(axis=0), 1e-30)
    relative = table / scale / seconds[:, None] * seconds.mean()
    normal = relative.T @ relative + _RIDGE * np.eye(len(scale))
    weights = np.linalg.solve(normal, relative.T @ np.full(len(samples), seconds.mean())) / scale
    least = float(seconds.min()) / 10
    return lambda sample: max(least, float(np.dot(weights, _features(sample, total_sms))))


def _features(sample: Sample, total_sms: int) -> list[float]:
    sms, _ = shares(sample.step, sample.partition, sample.alongside, total_sms)
    step, found = sample.step, [1.0, 1.0 / sms]
    counts = [step.prefill_tokens, step.prefill_pairs, step.decode_rows, step.decode_context]
    for count in counts:
        found += [float(count), count / sms]
    beside = sample.alongside
    return found + ([0.0, 0.0] if beside is None else [float(beside.rows), float(beside.decode_context)])
