"""How long a step takes on a device that is not there, from measured tables.

Knows nothing about queues or time; a truth answers for one step at a time. The first truth is one NVIDIA H200
(132 SMs) running Llama-3.1-8B shapes in bfloat16 with stock kernels, measured on 2026-11-29 (docs/LOG.md):
prefill scales with SMs, decode reaches 80 % of its speed on half of them, a mixed step saves about a tenth of its
two parts' times, and two lanes slow each other a little because the clock falls at the power cap.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: prompt tokens and the tokens they attend to before them, decode rows and their
    context, and the share of the model's layers."""

    prompt_tokens: int = 0
    earlier_tokens: int = 0
    rows: int = 0
    context_tokens: int = 0
    layers_share: float = 1.0


class Truth(Protocol):
    """The device's physics."""

    total_sms: int

    def alone_s(self, work: Work, sms: int) -> float:
        """Seconds the step takes on `sms` SMs with nothing beside it."""

    def slowdown(self, work: Work, beside: Work) -> float:
        """Factor by which `work` is slower while `beside` runs on the other SMs. At least 1."""


_SMS = (16, 32, 48, 64, 80, 96, 112, 132)
_PREFILL_TOKENS = (512, 2048, 8192)
_PREFILL_MS = (
    (77.0, 40.0, 27.9, 21.7, 18.8, 18.0, 17.4, 11.8),
    (315.0, 166.0, 111.0, 88.8, 72.3, 66.9, 63.9, 47.6),
    (1396.0, 707.0, 470.0, 359.0, 306.0, 279.0, 249.0, 232.0),
)
_DECODE_SHAPES = ((32, 1024), (128, 1024), (64, 4096), (256, 1024))
_DECODE_MS = (
    (15.0, 8.8, 7.3, 6.3, 6.4, 6.3, 6.3, 5.9),
    (37.8, 20.1, 14.9, 11.8, 11.5, 11.3, 11.4, 9.4),
    (39.8, 21.6, 16.6, 13.8, 14.5, 14.1, 13.3, 12.7),
    (70.3, 37.0, 26.9, 20.2, 19.5, 19.4, 18.3, 14.9),
)
_MIXED_GAIN = 1.11
_BESIDE_PREFILL, _BESIDE_DECODE = 1.15, 1.10
_ATTENTION_S_PER_PAIR_SM = 132 * 4 * 32 * 4096 / 400e12


class H200Table:
    """The tables, interpolated: prefill in the logarithms of tokens, decode by a plane through each column."""

    total_sms = 132

    def __init__(self) -> None:
        shapes = np.array([(1.0, batch, batch * context) for batch, context in _DECODE_SHAPES])
        planes, *_ = np.linalg.lstsq(shapes, np.array(_DECODE_MS), rcond=None)
        self._decode_planes = [tuple(float(x) for x in column) for column in planes.T]

    def alone_s(self, work: Work, sms: int) -> float:
        """Seconds on `sms` SMs; between measured SM counts by straight lines."""
        low, high, weight = _between(_SMS, sms)
        ms = (1 - weight) * self._column_ms(work, low) + weight * self._column_ms(work, high)
        attention_s = work.prompt_tokens * work.earlier_tokens * _ATTENTION_S_PER_PAIR_SM / sms
        return work.layers_share * (ms / 1e3 + attention_s)

    def slowdown(self, work: Work, beside: Work) -> float:
        """A tenth for prefill, a seventh for decode, as measured at the cap."""
        return _BESIDE_PREFILL if beside.prompt_tokens and not work.prompt_tokens else _BESIDE_DECODE

    def _column_ms(self, work: Work, column: int) -> float:
        prefill_ms = self._prefill_ms(work.prompt_tokens, column) if work.prompt_tokens else 0.0
        if not work.rows:
            return prefill_ms
        base, per_row, per_token = self._decode_planes[column]
        decode_ms = base + per_row * work.rows + per_token * work.context_tokens
        return (prefill_ms + decode_ms) / (_MIXED_GAIN if prefill_ms else 1.0)

    def _prefill_ms(self, tokens: int, column: int) -> float:
        floor_ms = self._decode_planes[column][0]
        first_ms = _PREFILL_MS[0][column]
        if tokens <= _PREFILL_TOKENS[0]:
            return max(floor_ms, first_ms * tokens / _PREFILL_TOKENS[0])
        low, high, weight = _between([log(t) for t in _PREFILL_TOKENS], log(tokens), extend=True)
        return exp((1 - weight) * log(_PREFILL_MS[low][column]) + weight * log(_PREFILL_MS[high][column]))


def _between(points: Sequence[float], x: float, extend: bool = False) -> tuple[int, int, float]:
    """Neighbours of x and the weight of the upper one; beyond the ends the last two, or the end alone."""
    high = min(max(bisect_right(points, x), 1), len(points) - 1)
    weight = (x - points[high - 1]) / (points[high] - points[high - 1])
    return high - 1, high, weight if extend else min(max(weight, 0.0), 1.0)
