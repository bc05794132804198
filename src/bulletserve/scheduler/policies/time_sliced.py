"""`time_sliced`: prefill and decode take turns on the whole device, waiting prompts first.

All layers and tokens of one prefill batch run back to back; every running stream pauses for as long.
"""

from dataclasses import dataclass
from typing import ClassVar

from bulletserve.core.errors import ConfigError
from bulletserve.core.plan import Plan
from bulletserve.core.snapshot import Snapshot
from bulletserve.scheduler.batching import admissions, admitted_tokens, decode_or_preempt, next_group
from bulletserve.scheduler.policy import Forecaster
from bulletserve.scheduler.queue_parts import QueueParts


@dataclass(frozen=True)
class TimeSliced(QueueParts):
    """`batch_tokens`: most tokens of one prefill batch (0: as many as keep the device busy)."""

    batch_tokens: int = 0
    name: ClassVar[str] = "time_sliced"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_tokens < 0:
            raise ConfigError("batch_tokens must be at least 1, or 0 for the device's own")

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        """Admit, else prefill, else decode."""
        whole = snapshot.limits.lattice.total_sms
        if snapshot.prefill_lane.queued or snapshot.prefilling_rows:
            return Plan(because="a prefill batch has the device")
        tokens = self.batch_tokens or snapshot.limits.batch_tokens
        room = tokens - admitted_tokens(snapshot)
        admit = admissions(snapshot, room, self.waiting(snapshot, estimator)) if room > 0 else ()
        if admit:
            return Plan(admit=admit, because="waiting prompts first")
        group = next_group(snapshot, tokens, whole, whole=True, entries=self.admitted(snapshot, estimator))
        if group is not None:
            return Plan(starts=(group,), because="waiting prompts first")
        if snapshot.decode_lane.queued >= 2:
            return Plan(because="decode is a step ahead")
        step, victims = decode_or_preempt(snapshot, whole)
        return Plan(starts=(step,) if step else (), preempt=victims, because="no prompt waits")
