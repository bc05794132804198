"""Devices whose physics fit in a few lines: their forecasts for policies, and their truth for simulations."""

from dataclasses import dataclass

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.estimator.estimator import Forecast
from bulletserve.simulator.truth import Uncapped


@dataclass(frozen=True)
class Arithmetic:
    """Prefill scales with SMs, decode up to half of them.

    `beside`: how much slower either lane is while the other runs. `ride`: what decode rows in a mixed step cost, in
    parts of a decode step. Seconds are those of a model of `num_layers` layers on all SMs.
    """

    total_sms: int = 8
    num_layers: int = 8
    beside: float = 1.1
    ride: float = 0.8
    token_s: float = 1e-4
    step_s: float = 4e-3
    row_s: float = 1e-4

    def predict(self, step: StepShape, partition: Partition, alongside: StepShape | None = None) -> Forecast:
        sms = partition.decode_sms if step.kind == "decode" else partition.prefill_sms
        sms = self.total_sms if step.kind == "mixed" else sms
        assert sms > 0
        share = step.layers / self.num_layers
        seconds = share * self.seconds(step.prefill_tokens, step.decode_rows, sms)
        if alongside is not None:
            seconds *= self.beside
        return Forecast(seconds, seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)

    def seconds(self, tokens: int, rows: int, sms: float) -> float:
        prefill_s = tokens * self.token_s * self.total_sms / sms
        decode_s = (self.step_s + rows * self.row_s) * max(1.0, self.total_sms / 2 / sms) if rows else 0.0
        return prefill_s + decode_s * (self.ride if tokens else 1.0)


@dataclass(frozen=True)
class ArithmeticTruth(Uncapped):
    """The device that `Arithmetic` forecasts without fault."""

    physics: Arithmetic

    @property
    def total_sms(self) -> int:
        return self.physics.total_sms

    def alone_s(self, step: StepShape, sms: int) -> float:
        share = step.layers / self.physics.num_layers
        return share * self.physics.seconds(step.prefill_tokens, step.decode_rows, sms)

    def beside_s(self, step: StepShape, sms: int, other: StepShape, other_sms: int) -> float:
        return self.physics.beside * self.alone_s(step, sms)


FORECASTS = Arithmetic()
