"""What a policy is: a pure function from a snapshot and forecasts to a plan.

Knows nothing about any particular policy, and a policy knows nothing but what it is given: the same snapshot and the
same calibration give the same plan, so every decision of a production run can be made again.
"""

from typing import Protocol

from bulletserve.core.errors import ConfigError
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.plan import Plan
from bulletserve.core.snapshot import Snapshot
from bulletserve.estimator.estimator import Forecast
from bulletserve.scheduler.queue_rules import QueueRules


class Forecaster(Protocol):
    """Whatever can say how long a step will take: `estimator.Estimator`, or a test's arithmetic.

    Must be a function of its arguments (a memo is fine); the snapshot's correction is the caller's to apply.
    """

    def predict(self, step: StepShape, partition: Partition, alongside: StepShape | None = None) -> Forecast:
        """`step` on its lane's share of `partition`, a mixed step on all SMs; `alongside` on the other share."""


class NoForecasts:
    """Stands in where no calibration is at hand and the policy needs none."""

    def predict(self, step: StepShape, partition: Partition, alongside: StepShape | None = None) -> Forecast:
        """Raises `ConfigError`."""
        raise ConfigError("this policy asks for forecasts and said it needs none: set its needs_forecasts")


class Policy(Protocol):
    """Decides. Must return a plan that `scheduler/plan_check` accepts for the same snapshot."""

    @property
    def name(self) -> str:
        """Its name, as in `--policy`."""

    @property
    def needs_forecasts(self) -> bool:
        """Whether it cannot work without a calibration; it then never sees `NoForecasts`."""

    @property
    def rules(self) -> QueueRules:
        """How the queue in front of it is kept."""

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        """What to start now. Asked again until it has nothing to add, so one thing at a time is enough."""
