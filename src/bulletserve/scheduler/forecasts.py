"""Forecasts of work that is in no plan yet: a prompt alone, a whole queue.

Knows nothing about policies. Corrected by what observed steps say; 0 where nothing forecasts.
"""

from bulletserve.core.correction import Correction
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.snapshot import Limits
from bulletserve.scheduler.policy import Forecaster


def prompt_s(
    estimator: Forecaster | None, limits: Limits, correction: Correction, tokens: int, cached: int = 0
) -> float:
    """Seconds from the first layer of a prompt of `tokens` tokens behind `cached` known ones to its first token, alone
    on the whole device."""
    if estimator is None or not tokens:
        return 0.0
    shape = StepShape.prefill([(tokens, cached)], limits.num_layers, 1)
    whole = Partition(limits.lattice.total_sms, 0)
    return estimator.predict(shape, whole).seconds * correction.prefill


def queue_s(estimator: Forecaster | None, limits: Limits, correction: Correction, tokens: int) -> float:
    """Seconds that the whole device needs for so many prompt tokens, in batches that keep it busy."""
    batch = min(tokens, limits.batch_tokens)
    return prompt_s(estimator, limits, correction, batch) * tokens / batch if batch else 0.0
