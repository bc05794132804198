"""How long a step takes on a device that is not there: what the simulated device goes by, never the policy's estimator.

Knows nothing about queues or time. A `ModelTruth` is the estimator's physics with constants of its own: those of a
calibration, each moved by up to some share, and a factor on each phase that no constant explains, as a device differs
from its calibration and keeps doing so. Counts of tokens are exact, because tiles in waves make steps of them; sums
over contexts, in which times are smooth, are rounded to a fine grid, so that steps can be remembered.

Where both lanes ask for the same SMs (a share beside a step on the whole device), prefill's long kernels keep most of
them: measured on one H200, prefill on all SMs beside decode (32 x 2048) on 32 or 64 leaves it 48 to 64 ms a step, which
is the speed of about a fifth of its share.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt
from random import Random
from typing import NamedTuple, Protocol

from bulletserve.core.errors import ConfigError
from bulletserve.core.operators import Kind, StepShape
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.calibration import Calibration
from bulletserve.estimator.estimator import Forecast, forecast, forecast_pair
from bulletserve.estimator.parameters import BOUNDS, Parameters
from bulletserve.estimator.power import Running, watts_at
from bulletserve.estimator.roofs import ALONE, Roofs, WaveMemo, beside, roofs
from bulletserve.estimator.work import ModelWork, Work

DECODE_PART_OF_CONTESTED = 0.2
"""Share of the SMs that both lanes ask for which decode gets."""

_DIGITS = 8  # leading binary digits kept of sums over contexts: steps below 1 %
_MOST_REMEMBERED = 1 << 18

_Counts = tuple[int, int, int, int, int, int, int]


class Pace(NamedTuple):
    """Seconds of a whole step: `steady_s` where it runs again and again under the same conditions, `top_s` at the
    highest clock, while the power cap does not hold it yet. `asked_w`: the device's power at the highest clock."""

    steady_s: float
    top_s: float
    asked_w: float


class Truth(Protocol):
    """The device's physics."""

    @property
    def total_sms(self) -> int:
        """SMs (or threads) of the device."""

    @property
    def idle_w(self) -> float:
        """What it draws when nothing runs."""

    @property
    def power_cap_w(self) -> float:
        """What it may draw; infinite: no cap."""

    def alone(self, step: StepShape, sms: int) -> Pace:
        """On `sms` SMs with nothing beside it."""

    def beside(self, step: StepShape, sms: int, other: StepShape, other_sms: int) -> Pace:
        """On `sms` SMs while `other` runs on `other_sms`; more than there are together: they share, somehow."""


class Uncapped(ABC):
    """A device without a power cap, given the seconds of its steps: what small examples are made of."""

    idle_w, power_cap_w = 0.0, inf

    @abstractmethod
    def alone_s(self, step: StepShape, sms: int) -> float:
        """As `Truth.alone`, in seconds."""

    @abstractmethod
    def beside_s(self, step: StepShape, sms: int, other: StepShape, other_sms: int) -> float:
        """As `Truth.beside`, in seconds."""

    def alone(self, step: StepShape, sms: int) -> Pace:
        """See `Truth`."""
        seconds = self.alone_s(step, sms)
        return Pace(seconds, seconds, 0.0)

    def beside(self, step: StepShape, sms: int, other: StepShape, other_sms: int) -> Pace:
        """See `Truth`."""
        seconds = self.beside_s(step, sms, other, other_sms)
        return Pace(seconds, seconds, 0.0)


@dataclass(frozen=True)
class Perturbation:
    """How a truth differs from its calibration: a factor on each constant, and one on each phase's seconds."""

    share: float
    seed: int
    constants: dict[str, float]
    prefill: float
    decode: float

    def describe(self) -> str:
        """In a few words, to stand beside every number."""
        if not self.share:
            return "truth: the calibration itself"
        return (
            f"truth: each constant within {self.share:.0%} (seed {self.seed}), "
            f"prefill x {self.prefill:.3f}, decode x {self.decode:.3f}"
        )


def perturbation(share: float, seed: int) -> Perturbation:
    """Factors between 1 / (1 + share) and 1 + share, even in their logarithms. Raises `ConfigError` for no share."""
    if not 0 <= share <= 1:
        raise ConfigError(f"a perturbation is a share from 0 to 1, not {share}")
    rng, most = Random(f"truth {seed}"), log(1 + share)
    factors = {name: exp(rng.uniform(-most, most)) for name in BOUNDS}
    return Perturbation(share, seed, factors, exp(rng.uniform(-most, most)), exp(rng.uniform(-most, most)))


class ModelTruth:
    """A device that obeys the estimator's physics with `constants`; `prefill` and `decode` are factors on seconds.

    A mixed step, which is both, is off by their geometric mean.
    """

    def __init__(
        self,
        constants: Parameters,
        total_sms: int,
        shape: ModelShape,
        dtype_bytes: int = 2,
        prefill: float = 1.0,
        decode: float = 1.0,
    ) -> None:
        self.total_sms = total_sms
        self.idle_w, self.power_cap_w = constants.static_w, constants.power_cap_w
        self._constants, self._model = constants, ModelWork(constants, shape, dtype_bytes)
        self._factors: dict[Kind, float] = {"prefill": prefill, "decode": decode, "mixed": sqrt(prefill * decode)}
        self._waves = WaveMemo(constants)
        self._work: dict[_Counts, Work] = {}
        self._alone: dict[tuple[_Counts, float], Pace] = {}
        self._beside: dict[tuple[_Counts, float, _Counts, float], tuple[Pace, Pace]] = {}

    @classmethod
    def perturbed(
        cls, calibration: Calibration, shape: ModelShape, change: Perturbation, dtype_bytes: int = 2
    ) -> "ModelTruth":
        """`calibration` as `change` moves it; no constant leaves its physical range."""
        found = calibration.parameters
        moved = {}
        for name, factor in change.constants.items():
            low, high = BOUNDS[name]
            moved[name] = min(high, max(low, getattr(found, name) * factor))
        if found.power_cap_w < moved["static_w"] / 0.8:
            moved["static_w"] = 0.8 * found.power_cap_w
        constants = replace(found, **moved)
        return cls(constants, calibration.total_sms, shape, dtype_bytes, change.prefill, change.decode)

    def alone(self, step: StepShape, sms: int) -> Pace:
        """See `Truth`."""
        key = _counts(step), float(sms)
        found = self._alone.get(key)
        if found is None:
            self._forget()
            own = self._roofs(*key)
            asked_w = watts_at(self._constants, ((own, ALONE),), 1.0)
            found = self._alone[key] = self._pace(step.kind, forecast(self._constants, own), own, asked_w)
        return found

    def beside(self, step: StepShape, sms: int, other: StepShape, other_sms: int) -> Pace:
        """See `Truth`; one of the two is decode, the other prefill."""
        if step.decode_rows:
            decode_sms, prefill_sms = effective_sms(sms, other_sms, self.total_sms)
            key = _counts(other), prefill_sms, _counts(step), decode_sms
        else:
            decode_sms, prefill_sms = effective_sms(other_sms, sms, self.total_sms)
            key = _counts(step), prefill_sms, _counts(other), decode_sms
        found = self._beside.get(key)
        if found is None:
            self._forget()
            found = self._beside[key] = self._pair(*key)
        return found[1] if step.decode_rows else found[0]

    def _pair(self, prefill: _Counts, prefill_sms: float, decode: _Counts, decode_sms: float) -> tuple[Pace, Pace]:
        one, other = self._roofs(prefill, prefill_sms), self._roofs(decode, decode_sms)
        running: Running = (one, beside(self._constants, other)), (other, beside(self._constants, one))
        asked_w = watts_at(self._constants, running, 1.0)
        found = forecast_pair(self._constants, one, other)
        return self._pace("prefill", found[0], one, asked_w), self._pace("decode", found[1], other, asked_w)

    def _pace(self, kind: Kind, steady: Forecast, own: Roofs, asked_w: float) -> Pace:
        factor, top_s = self._factors[kind], max(steady.seconds - steady.clock_s, own.least_s)
        return Pace(steady.seconds * factor, top_s * factor, asked_w)

    def _roofs(self, counts: _Counts, sms: float) -> Roofs:
        found = self._work.get(counts)
        if found is None:
            found = self._work[counts] = self._model.of(StepShape(*counts))
        return roofs(self._constants, found, sms, self.total_sms, self._waves)

    def _forget(self) -> None:
        """Keeps memory bounded; what was forgotten comes out the same again."""
        if len(self._beside) + len(self._alone) >= _MOST_REMEMBERED:
            self._alone, self._beside, self._work = {}, {}, {}
            self._waves = WaveMemo(self._constants)


def effective_sms(decode_sms: float, prefill_sms: float, total_sms: int) -> tuple[float, float]:
    """SMs that decode and prefill really have beside each other."""
    contested = max(0.0, decode_sms + prefill_sms - total_sms)
    part = DECODE_PART_OF_CONTESTED
    return decode_sms - (1 - part) * contested, prefill_sms - part * contested


def _counts(step: StepShape) -> _Counts:
    return (
        step.prefill_tokens,
        _rounded(step.prefill_pairs),
        _rounded(step.prefill_context),
        step.decode_rows,
        _rounded(step.decode_context),
        step.layers,
        step.sampled,
    )


def _rounded(count: int) -> int:
    shift = count.bit_length() - _DIGITS
    return count if shift <= 0 else (count + (1 << shift - 1)) >> shift << shift
