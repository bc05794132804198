"""A policy that does anything a plan may do: whatever it breaks is a rule that `plan_check` lacks."""

from random import Random

from bulletserve.core.errors import PlanError
from bulletserve.core.plan import DecodeStep, MixedStep, Plan, PrefillGroup, Refusal, Start
from bulletserve.core.snapshot import MAX_RANGE_TOKENS, Snapshot
from bulletserve.scheduler.plan_check import plan_check
from bulletserve.scheduler.policies.static_split import StaticSplit
from bulletserve.scheduler.policy import Forecaster
from bulletserve.scheduler.queue_rules import QueueRules


class RandomPolicy:
    """Random for some hundred decisions, then sober, so that every history ends."""

    name = "random"
    needs_forecasts = False
    rules = QueueRules()

    def __init__(self, seed: int, decisions: int = 300, *, refuses: bool = False) -> None:
        self._rng = Random(seed)
        self._left = decisions
        self._refuses = refuses
        self._sober = StaticSplit(batch_tokens=16)
        self.refused: set[int] = set()

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        self._left -= 1
        busy = snapshot.prefill_lane.queued + snapshot.decode_lane.queued
        for _ in range(4 if self._left > 0 else 0):
            plan = self._any(snapshot)
            if plan.is_empty and not busy:
                continue
            try:
                plan_check(snapshot, plan)
            except PlanError:
                continue
            self.refused |= {refusal.request_id for refusal in plan.refuse}
            return plan
        return self._sober.decide(snapshot, estimator)

    def _any(self, snapshot: Snapshot) -> Plan:
        rng = self._rng
        waiting = [entry.request_id for entry in snapshot.waiting]
        refused = waiting[:1] if self._refuses and rng.random() < 0.05 else []
        admit = [i for i in waiting if i not in refused and rng.random() < 0.4]
        preempt = [victim.request_id for victim in snapshot.victims if rng.random() < 0.5]
        rng.shuffle(admit)
        rng.shuffle(preempt)
        starts = [start for start in (self._prefill(snapshot), self._decode(snapshot)) if start is not None]
        if rng.random() < 0.3:
            requests, ranges = self._ranges(snapshot)
            starts = [MixedStep(requests, ranges, snapshot.limits.lattice.total_sms)]
        rng.shuffle(starts)
        return Plan(
            tuple(starts[: rng.randint(0, 2)]),
            tuple(admit),
            tuple(preempt),
            tuple(Refusal(request_id, "no", 1.0) for request_id in refused),
        )

    def _prefill(self, snapshot: Snapshot) -> Start | None:
        layers = snapshot.limits.num_layers
        sms = self._rng.choice(sorted(snapshot.limits.lattice.prefill_shares))
        if snapshot.prefill is not None:
            batch = snapshot.prefill
            end = self._rng.randint(batch.next_layer + 1, layers)
            return PrefillGroup(batch.requests, batch.token_ranges, (batch.next_layer, end), sms)
        requests, ranges = self._ranges(snapshot)
        return PrefillGroup(requests, ranges, (0, self._rng.randint(1, layers)), sms) if requests else None

    def _decode(self, snapshot: Snapshot) -> Start:
        return DecodeStep(self._rng.choice(sorted(snapshot.limits.lattice.decode_shares)))

    def _ranges(self, snapshot: Snapshot) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        chosen = [entry for entry in snapshot.admitted if self._rng.random() < 0.7]
        self._rng.shuffle(chosen)
        ranges = []
        for entry in chosen:
            most = min(entry.prompt_tokens, entry.computed_tokens + MAX_RANGE_TOKENS)
            end = most if self._rng.random() < 0.5 else self._rng.randint(entry.computed_tokens + 1, most)
            ranges.append((entry.computed_tokens, end))
        return tuple(entry.request_id for entry in chosen), tuple(ranges)
