"""One step on a share of SMs, operator by operator, as a function of the clock and of what runs beside it.

Knows nothing about power. Three roofs bound an operator, each a time:

    C  flops / (flops a second and SM x SMs) x wave factor     falls with the clock
    S  bytes / (bytes a second and SM x SMs)                   falls with the clock: SMs issue the loads
    D  bytes / bytes a second of the device                    the memory's own, whatever the clock

and they join smoothly: M = (S^k + D^k)^(1/k) has bandwidth's knee where S = D, and t = (C^p + M^p)^(1/p). A step is the
sum of its operators and a launch constant per layer; large steps, launched one by one, take the host's time at least.

Beside another step D has what bandwidth is left. C and S wait for loads that come back later, the more so the busier
the neighbour keeps the memory or its SMs; the clock does not change that. So an SM goes at the pace of its clock or of
its loads, whichever is slower: where the cap has the clock at 0.7, what the neighbour does to loads is hidden. A kernel
that starts and drains does nothing but wait for loads: launches take longer by as much as loads do.
"""

from collections.abc import Iterable
from typing import NamedTuple

from bulletserve.estimator.parameters import Parameters
from bulletserve.estimator.waves import wave_factor
from bulletserve.estimator.work import Tiled, Work

_LEAST_BANDWIDTH_LEFT = 0.1

Rows = tuple[tuple[float, float, float], ...]
"""Operators as (C^p, S^k, D^k) at the top clock, all executions counted."""


class Roofs(NamedTuple):
    """One step on its SMs, alone.

    `compute_s` and `memory_s` add up to the time at the top clock without wave loss; `body_s` has the loss in it.
    `sm_j` is the energy that falls with the clock, `memory_j` that which does not. `used` is the share of the memory's
    bandwidth, `computing` that of the device's SMs times the time they compute.
    """

    sms: float
    rows: Rows
    compute_s: float
    memory_s: float
    body_s: float
    launch_s: float
    least_s: float
    sm_j: float
    memory_j: float
    used: float
    computing: float


class WaveMemo:
    """Wave losses of one device, by (rows, products, SMs); what was asked before cannot be seen in an answer."""

    def __init__(self, constants: Parameters) -> None:
        self._small, self._split, self._overlap = constants.small_tile, constants.split_loss, constants.overlap
        self._losses: dict[tuple[int, Tiled, float, bool], float] = {}

    def loss(self, top: int, tiled: Tiled, sms: float, whole: bool) -> float:
        """(rows x wave factor)^p of products of `top` rows, averaged over them; `top` as in `WorkRow`."""
        key = (top, tiled, sms, whole)
        found = self._losses.get(key)
        if found is None:
            small, split = self._small, self._split
            mean = sum(share * wave_factor(top, n, sms, small, split, whole=whole) for n, share in tiled.products)
            found = self._losses[key] = (top * mean) ** self._overlap
        return found

    def fill(self, tops: Iterable[int], tiled: Tiled, sms: float, whole: bool) -> None:
        """Compute losses before anybody asks."""
        for top in tops:
            self.loss(top, tiled, sms, whole)


def roofs(constants: Parameters, step: Work, sms: float, total_sms: int, waves: WaveMemo) -> Roofs:
    """`step` on `sms` of a device's `total_sms`."""
    p, k = constants.overlap, constants.knee
    per_c, per_s, power, root, straight = sms**-p, sms**-k, p / k, 1.0 / p, 1.0 / k
    whole = step.whole and sms < total_sms
    rows: list[tuple[float, float, float]] = []
    compute_s = ideal_s = body_s = 0.0
    for compute, loads, from_device, top, per_row, tiled in step.rows:
        from_sms = loads * per_s
        if compute:
            ideal, memory = compute * per_c, (from_sms + from_device) ** power
            seconds = (ideal + memory) ** root
            compute_s += seconds * ideal / (ideal + memory)
        else:
            ideal = memory = 0.0
            seconds = (from_sms + from_device) ** straight
        ideal_s += seconds
        if top:
            ideal *= waves.loss(top, tiled, sms, whole) * per_row
            seconds = (ideal + memory) ** root
        body_s += seconds
        rows.append((ideal, from_sms, from_device))
    seconds = max(body_s + step.launch_s, step.least_s)
    return Roofs(
        sms,
        tuple(rows),
        compute_s,
        ideal_s - compute_s,
        body_s,
        step.launch_s,
        step.least_s,
        step.sm_j,
        step.memory_j,
        min(1.0, step.moved_s / seconds),
        compute_s / seconds * sms / total_sms,
    )


Slowed = tuple[float, float, float, float, float]
"""What the neighbour makes of a step: factors on C^p and S^k where the clock is no slower, and on D^k; by what
share C and S take longer there."""

ALONE: Slowed = (1.0, 1.0, 1.0, 0.0, 0.0)


def beside(constants: Parameters, other: Roofs) -> Slowed:
    """What `other` does to a step on other SMs."""
    left = max(_LEAST_BANDWIDTH_LEFT, 1.0 - constants.bandwidth_taken * other.used)
    busiest = other.used if other.used > other.computing else other.computing
    wait_c, wait_s, k = constants.compute_slowed * other.used, constants.stream_slowed * busiest, constants.knee
    return (1.0 + wait_c) ** constants.overlap, (1.0 + wait_s) ** k, left**-k, wait_c, wait_s


def body_at(rows: Rows, factors: tuple[float, float, float], knee: float, overlap: float) -> tuple[float, float, float]:
    """Seconds in operators, without launches, and how they go with C and with S: d seconds / d log(C or S).

    `factors` on C^p, S^k and D^k: what the neighbour or the clock does.
    """
    slow_c, slow_s, slow_d = factors
    power, root, straight = overlap / knee, 1.0 / overlap, 1.0 / knee
    total = with_c = with_s = 0.0
    for c, s, d in rows:
        loads = s * slow_s
        moved = loads + d * slow_d
        if c:
            compute, memory = c * slow_c, moved**power
            both = compute + memory
            seconds = both**root
            share = seconds / both
            with_c += share * compute
            with_s += share * memory * loads / moved
        else:
            seconds = moved**straight
            with_s += seconds * loads / moved
        total += seconds
    return total, with_c, with_s
