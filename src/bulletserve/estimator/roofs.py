"""One step on a share of SMs, operator by operator, as a function of the clock and of what runs beside it.

Knows nothing about power or memos. Three roofs bound an operator, each a time:

    C  flops / (flops a second and SM x SMs) x wave factor     falls with the clock
    S  bytes / (bytes a second and SM x SMs)                   falls with the clock: SMs issue the loads
    D  bytes / bytes a second of the device                    the memory's own, whatever the clock

and they join smoothly: M = (S^k + D^k)^(1/k) has bandwidth's knee where S = D, and t = (C^p + M^p)^(1/p). A step is the
sum of its operators and a launch constant per layer; large steps, launched one by one, take the host's time at least.
Beside another step D has what bandwidth is left, C and S are slowed by fitted factors.
"""

from typing import NamedTuple

from bulletserve.estimator.parameters import Parameters
from bulletserve.estimator.waves import wave_factor
from bulletserve.estimator.work import Tiled, Work

_LEAST_BANDWIDTH_LEFT = 0.1


class Roofs(NamedTuple):
    """One step on its SMs, alone. Each row of `rows` is an operator's (C^p, S^k, D^k), all executions counted.

    `compute_s` and `memory_s` add up to the time at the top clock without wave loss; `body_s` has the loss in it.
    `sm_j` is the energy that falls with the clock, `memory_j` that which does not. `used` is the share of the memory's
    bandwidth, `computing` that of the device's SMs times the time they compute.
    """

    sms: float
    rows: tuple[tuple[float, float, float], ...]
    compute_s: float
    memory_s: float
    body_s: float
    launch_s: float
    least_s: float
    sm_j: float
    memory_j: float
    used: float
    computing: float


class Curve(NamedTuple):
    """Seconds as a function of the clock. `rows` as in `Roofs`, contention included."""

    rows: tuple[tuple[float, float, float], ...]
    knee: float
    overlap: float
    launch_s: float
    least_s: float

    def body_s(self, clock: float) -> float:
        """Time in operators at a clock ratio, without launches."""
        falls_c, falls_s = clock**-self.overlap, clock**-self.knee
        power, root = self.overlap / self.knee, 1.0 / self.overlap
        total = 0.0
        for c, s, d in self.rows:
            total += (c * falls_c + (s * falls_s + d) ** power) ** root
        return total

    def seconds(self, clock: float) -> float:
        """The whole step."""
        return max(self.body_s(clock) + self.launch_s, self.least_s)


WaveMemo = dict[tuple[int, Tiled, float], float]
"""Wave factors to the power p by (rows, products, SMs): all that they depend on within an estimator's life."""


def roofs(constants: Parameters, step: Work, sms: float, total_sms: int, waves: WaveMemo) -> Roofs:
    """`step` on `sms` of a device's `total_sms`."""
    p, k = constants.overlap, constants.knee
    per_c, per_s, power, root = sms**-p, sms**-k, p / k, 1.0 / p
    rows: list[tuple[float, float, float]] = []
    compute_s = ideal_s = body_s = 0.0
    for compute, loads, from_device, m, tiled in step.rows:
        ideal, from_sms = compute * per_c, loads * per_s
        memory = (from_sms + from_device) ** power
        without_loss = (ideal + memory) ** root
        ideal_s += without_loss
        compute_s += without_loss * ideal / (ideal + memory)
        if m:
            ideal *= waves.get((m, tiled, sms)) or _waves(constants, m, tiled, sms, waves)
        body_s += (ideal + memory) ** root
        rows.append((ideal, from_sms, from_device))
    seconds = max(body_s + step.launch_s, step.least_s)
    return Roofs(
        sms=sms,
        rows=tuple(rows),
        compute_s=compute_s,
        memory_s=ideal_s - compute_s,
        body_s=body_s,
        launch_s=step.launch_s,
        least_s=step.least_s,
        sm_j=step.sm_j,
        memory_j=step.memory_j,
        used=min(1.0, step.moved_s / seconds),
        computing=compute_s / seconds * sms / total_sms,
    )


def curve(constants: Parameters, own: Roofs, beside: Roofs | None) -> Curve:
    """How long `own` takes at which clock, while `beside` runs on other SMs."""
    p, k = constants.overlap, constants.knee
    if beside is None:
        return Curve(own.rows, k, p, own.launch_s, own.least_s)
    left = max(_LEAST_BANDWIDTH_LEFT, 1.0 - constants.bandwidth_taken * beside.used)
    slow_c = (1.0 + constants.compute_slowed * beside.used) ** p
    slow_s = (1.0 + constants.stream_slowed * beside.computing) ** k
    slow_d = left**-k
    rows = tuple((c * slow_c, s * slow_s, d * slow_d) for c, s, d in own.rows)
    return Curve(rows, k, p, own.launch_s, own.least_s)


def _waves(constants: Parameters, m: int, tiled: Tiled, sms: float, memo: WaveMemo) -> float:
    small, split = constants.small_tile, constants.split_loss
    factor: float = sum(share * wave_factor(m, n, sms, small, split) for n, share in tiled) ** constants.overlap
    memo[m, tiled, sms] = factor
    return factor
