"""Policies of other people, for tests: what each has, and how they are installed."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

from bulletserve.core.plan import Plan
from bulletserve.core.snapshot import Snapshot
from bulletserve.scheduler import policies
from bulletserve.scheduler.policy import Forecaster
from bulletserve.scheduler.queue_rules import QueueRules


@dataclass(frozen=True)
class Foreign:
    """All that a policy has beside its name and its decisions."""

    needs_forecasts: ClassVar[bool] = False
    rules: ClassVar[QueueRules] = QueueRules()


@dataclass(frozen=True)
class Idle(Foreign):
    """Starts nothing."""

    name: ClassVar[str] = "idle"

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        return Plan()


def install(monkeypatch: pytest.MonkeyPatch, kinds: Mapping[str, type]) -> None:
    """As packages would, by the names that specs use; the classes must be found in their modules."""
    points = [
        EntryPoint(name, f"{kind.__module__}:{kind.__name__}", policies.ENTRY_POINTS) for name, kind in kinds.items()
    ]
    monkeypatch.setattr(policies, "entry_points", lambda group: points)
