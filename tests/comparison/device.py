"""A made-up device under `measuring`: runs that take no time and come out as told."""

from collections.abc import Sequence
from typing import Any

import pytest

from bulletserve.comparison import measuring as module
from bulletserve.comparison.arm_run import ArmRun, OutOfTime, TimedPrompt
from bulletserve.core.errors import PolicyError
from bulletserve.core.slo import Slo
from bulletserve.telemetry.latency import Answer

COUNT = 240


class Device:
    """Stands in for the engine: of the answers those beyond the `capacity` of their arm are late; a run takes no time,
    but `clock` goes on by its window times `slowness`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **capacity: float) -> None:
        self.capacity, self.slowness = capacity, 1.0
        self.ran: list[str] = []
        self.begun_s = 0.0
        self.of_code: dict[str, str] = {"code": "1", "device": "card"}
        self.failing: set[str] = set()
        monkeypatch.setattr(module, "run_arm", self.run_arm)
        monkeypatch.setattr(module, "fingerprint", lambda *_: dict(self.of_code))
        monkeypatch.setattr(module.time, "monotonic", lambda: self.begun_s)

    def run_arm(
        self, engine: None, policy: str, prompts: Sequence[TimedPrompt], slo: Slo, *, until_s: float, **_: Any
    ) -> ArmRun:
        if policy in self.failing:
            raise PolicyError(f"{policy} failed")
        if len(prompts) == 3:  # the warm-up
            return ArmRun(policy, [Answer(0.0, 1, [1.0], [1], "length")], 0.0, 1.0, (), 0.0, 0, {})
        window_s = max(one.arrival_s for one in prompts) * self.slowness
        if self.begun_s + window_s > until_s:
            raise OutOfTime
        self.begun_s += window_s
        rate = COUNT / (prompts[-1].arrival_s or 1.0)
        self.ran.append(f"{policy} {rate:.3f}")
        share = min(1.0, 0.9 * self.capacity.get(policy, 1.0) / rate)
        answers = [Answer(0.0, 5, [0.1 if at < 40 + share * 160 else 2.0], [at], "length") for at in range(COUNT)]
        return ArmRun(policy, answers, 0.0, window_s, (), 0.0, 0, {})
