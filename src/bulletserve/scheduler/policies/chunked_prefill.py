"""`chunked_prefill`: one forward carries a prefill chunk and the whole decode batch, on the whole device.

What vLLM, SGLang and SARATHI do. The budget bounds a step's tokens, so it trades the gap of running streams
against the speed of prompts; it is a proxy for a latency target and has to be tuned per model and load.
"""

from dataclasses import dataclass
from typing import ClassVar

from bulletserve.core.errors import ConfigError
from bulletserve.core.plan import DecodeStep, MixedStep, Plan
from bulletserve.core.snapshot import LANE_DEPTH, Snapshot
from bulletserve.scheduler.batching import admissions, admitted_tokens, make_room, next_group, prompt_ranges
from bulletserve.scheduler.policy import Forecaster
from bulletserve.scheduler.queue_parts import QueueParts


@dataclass(frozen=True)
class ChunkedPrefill(QueueParts):
    """`budget`: most tokens of a step, prefill and decode together, as in vLLM (0: as many as keep the device busy)."""

    budget: int = 0
    name: ClassVar[str] = "chunked_prefill"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget < 0:
            raise ConfigError("budget must be at least 1, or 0 for the device's own")

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        """Fill what decode leaves of the budget with prompt tokens, oldest prompt first."""
        whole = snapshot.limits.lattice.total_sms
        if max(snapshot.prefill_lane.queued, snapshot.decode_lane.queued) >= LANE_DEPTH:
            return Plan(because="a step ahead already")
        if snapshot.prefill is not None:
            group = next_group(snapshot, 0, whole, whole=True)
            return Plan(starts=(group,) if group else (), because="another policy's batch is under way")
        victims, rows, missing = make_room(snapshot)
        if victims or missing > 0:
            return Plan(preempt=victims, because=f"{missing} blocks are missing")
        budget = self.budget or snapshot.limits.batch_tokens
        room = max(budget - rows, 0 if rows else 1)
        lacking = room - admitted_tokens(snapshot)
        admit = admissions(snapshot, lacking, self.waiting(snapshot, estimator)) if lacking > 0 else ()
        if admit:
            return Plan(admit=admit, because=f"room for {lacking} prompt tokens")
        requests, ranges = prompt_ranges(snapshot, room, self.admitted(snapshot, estimator))
        if requests:
            tokens = sum(end - start for start, end in ranges)
            return Plan(
                starts=(MixedStep(requests, ranges, whole),),
                because=f"{tokens} prompt tokens beside {rows} rows",
            )
        return Plan(starts=(DecodeStep(whole),) if rows else (), because="no prompt waits")
