"""`static_split`: both lanes at once, each on a fixed share of the device.

What fixed spatial sharing (MPS shares, a hand-set partition) does. `alone=whole` gives the whole device to a lane
that has it to itself, which needs re-slicing but no judgement; `alone=share` keeps the shares whatever happens.
"""

from dataclasses import dataclass
from typing import ClassVar

from bulletserve.core.errors import ConfigError
from bulletserve.core.plan import Plan, Start
from bulletserve.core.snapshot import LANE_DEPTH, Snapshot
from bulletserve.scheduler.batching import admissions, admitted_tokens, decode_or_preempt, next_group
from bulletserve.scheduler.policy import Forecaster
from bulletserve.scheduler.queue_parts import QueueParts


@dataclass(frozen=True)
class StaticSplit(QueueParts):
    """`decode_fraction`: decode's share of the device.

    `batch_tokens`: most tokens of one prefill batch (0: as many as keep the device busy).
    """

    decode_fraction: float = 0.5
    batch_tokens: int = 0
    alone: str = "whole"
    name: ClassVar[str] = "static_split"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decode_fraction < 1:
            raise ConfigError("decode_fraction must lie between 0 and 1")
        if self.batch_tokens < 0:
            raise ConfigError("batch_tokens must be at least 1, or 0 for the device's own")
        if self.alone not in ("whole", "share"):
            raise ConfigError("alone must be 'whole' or 'share'")

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        """Keep both lanes busy; neither ever waits for the other."""
        limits = snapshot.limits
        split = limits.lattice.nearest_split(self.decode_fraction)
        tokens = self.batch_tokens or limits.batch_tokens
        room = tokens - admitted_tokens(snapshot)
        if snapshot.prefill is None and not snapshot.admitted and snapshot.prefill_lane.queued < LANE_DEPTH:
            admit = admissions(snapshot, room, self.waiting(snapshot, estimator))
            if admit:
                return Plan(admit=admit, because="the prefill lane is free")
        prefill_waits = snapshot.prefill is not None or bool(snapshot.admitted)
        prefills = prefill_waits or snapshot.prefill_lane.queued > 0
        decodes = snapshot.decode_rows > 0
        give_whole = self.alone == "whole"
        prefill_sms = limits.lattice.total_sms if give_whole and not decodes else split.prefill_sms
        decode_sms = limits.lattice.total_sms if give_whole and not prefills else split.decode_sms
        starts: list[Start] = []
        victims: tuple[int, ...] = ()
        if snapshot.decode_lane.queued < LANE_DEPTH:
            step, victims = decode_or_preempt(snapshot, decode_sms)
            starts += [step] if step else []
        if prefill_waits and snapshot.prefill_lane.queued < LANE_DEPTH and not victims:
            group = next_group(snapshot, tokens, prefill_sms, entries=self.admitted(snapshot, estimator))
            starts += [group] if group else []
        return Plan(
            starts=tuple(starts),
            preempt=victims,
            because=f"prefill on {prefill_sms}, decode on {decode_sms}",
        )
