"""`bullet`: both lanes at once, the partition chosen anew at each layer group and decode step; or whatever is better.

The paper's scheduler and beyond. Prompts are ordered so that as many as possible are in time (`prompt_order`), in
batches that just keep the device busy. Beside running answers, all ways to go on (`ways`: every split of the lattice, a
time slice, a mixed step of any size) are compared by forecast, and the cheapest decode step that keeps the answers'
pace (`decode_pace`) is taken. Decode pauses, and prefill has the whole device, while every running answer has slack.
Where prompts are at risk, that slack is spent at once; where no way keeps both targets, the balanced one is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import ClassVar

from bulletserve.core.errors import ConfigError
from bulletserve.core.plan import DecodeStep, MixedStep, Plan, PrefillGroup, Start, comes_after_both
from bulletserve.core.slo import NO_DEADLINE_S
from bulletserve.core.snapshot import (
    LANE_DEPTH,
    MAX_BATCH_TOKENS,
    MAX_RANGE_TOKENS,
    AdmittedEntry,
    Snapshot,
    StepUnderWay,
)
from bulletserve.scheduler import throughput
from bulletserve.scheduler.batching import admissions, make_room, next_group, prompt_ranges
from bulletserve.scheduler.decode_pace import Pace, pace, target_s
from bulletserve.scheduler.once import once
from bulletserve.scheduler.outlook import Batch, Outlook
from bulletserve.scheduler.partition_search import balanced, cheapest, cut, mixed_within, splits_within
from bulletserve.scheduler.policy import Forecaster
from bulletserve.scheduler.prompt_order import PromptOrder, next_batch
from bulletserve.scheduler.queue_parts import QueueParts
from bulletserve.scheduler.ways import Way, mixed, sliced, split

WAYS = ("split", "sliced", "mixed")

AT_RISK = 0.6
"""Prompts are at risk when the work before a deadline takes more than this part of the time up to it."""

NEED_MARGIN = 1.5
"""What prefill is taken to need where not all targets can be kept, over what is known to wait: more will come."""

HYSTERESIS = 0.05
"""What is being done is left for something cheaper by this part at least."""

MIXED_LONGER = 1.4
"""While the answers have slack, a mixed step may take so many times what other steps may: chunks come in tiles, and
where targets are tight a step has room for one tile or, with this, for two."""

SPLIT_LOSS = 0.1
"""What a split costs beyond its price: decode steps on all SMs that are still running as a batch begins, and those on a
share that outlast it. Simulated, 8 to 10 % of its price in batches of ten decode steps; a mixed step has none of it."""

SURELY_FREE = 0.01
"""So far below nothing, in parts of the longest step, a price is below that of every split: prefill on a share or
beside decode is never faster than alone on all SMs, but for the last digits of forecasts (`estimator/power`: 4e-5)."""

SHORT_TARGET_S = 0.010
"""A decode step that has not been queued begins most of a millisecond late (0.8 to 1.1 on an H200's host): a tenth of
such a TPOT target. Where targets are longer, newcomers and prompts gain more from the wait than decode loses."""

SURELY_LATER = 0.1
"""What ends later than something else by this part of what is left of that will end later, forecasts being what they
are."""

BATCH_PARTS = 4
"""A batch of a quarter of the device's `batch_tokens` ends so much sooner, for a tenth of its speed. Without a
deadline, speed is all."""


@dataclass(frozen=True)
class Bullet(QueueParts):
    """`ways`: those to consider, joined by +. `pause`: whether decode may wait while it has slack.

    `margin`: the part of a TPOT target that is kept in reserve. `longest_gap`: most time between two tokens of a
    running answer, in parts of its TPOT target (`mixed_longer` times that where a mixed step lies between them).
    """

    ordering: str = "slack"
    admission: str = "triage"
    ways: str = "split+sliced+mixed"
    pause: str = "yes"
    margin: float = 0.05
    longest_gap: float = 1.0
    mixed_longer: float = MIXED_LONGER
    name: ClassVar[str] = "bullet"

    @property
    def needs_forecasts(self) -> bool:
        """Everything is compared by forecast."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ways or not set(self.ways.split("+")) <= set(WAYS):
            raise ConfigError(f"ways must be some of {', '.join(WAYS)}, joined by +, not {self.ways!r}")
        if self.pause not in ("yes", "no"):
            raise ConfigError("pause must be yes or no")
        if not 0 <= self.margin < 1:
            raise ConfigError("margin must be at least 0 and below 1")
        for name in ("longest_gap", "mixed_longer"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be at least 1")

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        """Admit the next batch; else start what either lane should do next."""
        return _Decision(self, snapshot, estimator).plan()


class _Decision:
    """One decision: what its parts need, made at most once."""

    def __init__(self, options: Bullet, snapshot: Snapshot, estimator: Forecaster) -> None:
        self._options, self._snapshot = options, snapshot
        self._outlook = Outlook(snapshot, estimator)
        self._total = self._outlook.total_sms
        self._prefill, self._decode = snapshot.prefill_lane, snapshot.decode_lane

    def plan(self) -> Plan:
        """The first thing that is to be done."""
        snapshot = self._snapshot
        victims, _, missing = make_room(snapshot)
        if victims:
            return Plan(preempt=victims, because=f"{missing} blocks are missing")
        if self._may_open_batch and (admit := self._admissions()):
            return Plan(admit=admit, because="the next batch")
        has_prompts = snapshot.prefill is not None or bool(snapshot.admitted)
        if not snapshot.decode_rows or missing > 0:
            return self._prefill_alone() if has_prompts else Plan(because="nothing can start")
        return self._both() if has_prompts else self._decode_alone()

    # --- prompts --------------------------------------------------------------------------------------------

    @property
    def _may_open_batch(self) -> bool:
        return self._snapshot.prefill is None and self._prefill.queued < LANE_DEPTH

    @once
    def _order(self) -> PromptOrder:
        return self._options.order(self._snapshot, self._outlook)

    @property
    def _batch_tokens(self) -> int:
        parts = BATCH_PARTS if self._first_deadline_s < NO_DEADLINE_S else 1
        return max(1, self._snapshot.limits.batch_tokens // parts)

    @property
    def _first_deadline_s(self) -> float:
        first = next(iter(self._order.entries), None)
        return NO_DEADLINE_S if first is None else first.deadline_s

    @once
    def _backlog(self) -> bool:
        """Whether many prompts wait and neither they nor the running answers have a target."""
        without = target_s(self._snapshot) >= NO_DEADLINE_S and self._first_deadline_s >= NO_DEADLINE_S
        return without and throughput.is_backlog(self._snapshot)

    @once
    def _worth_s(self) -> float:
        return throughput.step_worth_s(self._snapshot, self._outlook)

    def _admissions(self) -> tuple[int, ...]:
        """Those of the next batch who have no blocks yet."""
        snapshot = self._snapshot
        if not (snapshot.waiting or snapshot.late):
            return ()
        entries = self._order.entries
        batch = entries[: next_batch(entries, self._batch_tokens)]
        tokens = sum(entry.tokens_left for entry in batch if not isinstance(entry, AdmittedEntry))
        return admissions(snapshot, tokens, self._order.waiting) if tokens else ()

    @once
    def _to_open(self) -> Sequence[AdmittedEntry]:
        """The prompts of the batch to open."""
        return self._admitted[: next_batch(self._admitted, self._batch_tokens)]

    @once
    def _admitted(self) -> Sequence[AdmittedEntry]:
        return tuple(islice(self._order.admitted, len(self._snapshot.admitted)))

    @once
    def _batch(self) -> Batch:
        """The batch under way or to be opened."""
        if self._snapshot.prefill is not None:
            return self._outlook.batch([(end - start, start) for start, end in self._snapshot.prefill.token_ranges])
        return self._outlook.batch(
            [(min(entry.tokens_left, MAX_RANGE_TOKENS), entry.computed_tokens) for entry in self._to_open]
        )

    @once
    def _load(self) -> float:
        """The part of the time up to a deadline that is needed for the work before it. A batch that will be late
        whatever is done for it is no reason to hurry; those behind it may be."""
        progress = self._snapshot.prefill
        if progress is None:
            return self._order.load
        work_s = self._batch.alone_s * (1.0 - progress.next_layer / self._snapshot.limits.num_layers)
        left_s = progress.deadline_s - self._snapshot.now_s
        return work_s / left_s if work_s < left_s else self._order.load

    def _group(self, sms: int) -> PrefillGroup:
        """The next layer group, of the batch under way or of a new one. There must be one."""
        if self._snapshot.prefill is not None:
            group = next_group(self._snapshot, 0, sms)
        else:
            group = next_group(self._snapshot, MAX_BATCH_TOKENS, sms, entries=self._to_open)
        assert group is not None
        return group

    # --- one lane alone -------------------------------------------------------------------------------------

    def _prefill_alone(self) -> Plan:
        if self._prefill.queued >= LANE_DEPTH:
            return Plan(because="prefill is a step ahead")
        if any(step.shape.sampled for step in self._groups):
            return Plan(because="newcomers are about to decode")
        return Plan(starts=(self._group(self._total),), because="no answer is running: prefill has the device")

    def _decode_alone(self) -> Plan:
        """No prompt is left to start. Those that are being finished are rows of a step on the whole device behind their
        group; of one on a share only if that is started after they have ended."""
        if self._decode.queued >= LANE_DEPTH:
            return Plan(because="decode is a step ahead")
        if not self._groups:
            return Plan(starts=(DecodeStep(self._total),), because="no prompt waits: decode has the device")
        share = self._groups[0].sms
        lattice, behind = self._snapshot.limits.lattice, DecodeStep(self._total)
        if self._outlook.ends_with_newcomers and comes_after_both(behind, lattice):
            return Plan(starts=(behind,), because="newcomers join behind the end of a batch")
        if share == self._total or self._decode.queued >= self._most_ahead:
            return Plan(because="newcomers are about to join")
        return Plan(starts=(DecodeStep(lattice.decode_beside(share)),), because="beside the end of a batch")

    @once
    def _groups(self) -> Sequence[StepUnderWay]:
        """What the prefill lane has of its own. A decode step on the whole device would wait for all of it."""
        return [step for step in self._prefill.steps if step.shape.kind == "prefill"]

    # --- both lanes -----------------------------------------------------------------------------------------

    def _both(self) -> Plan:
        if self._prefill.queued >= LANE_DEPTH:
            return self._decode_beside("prefill is a step ahead")
        outlook = self._outlook
        pace_ = pace(
            self._snapshot,
            outlook.decode_alone_s,
            outlook.decode_left_s,
            self._options.margin,
            backlog=self._backlog,
        )
        due_s = self._due_s(pace_)
        way = self._busiest(pace_) if self._backlog else self._way(pace_)
        because = f"{way.describe()}; due in {due_s * 1e3:.1f} ms, load {self._load:.2f}"
        if way.kind == "mixed":
            if self._decode.queued >= LANE_DEPTH:
                return Plan(because="next, " + because)
            requests, ranges = prompt_ranges(self._snapshot, way.tokens, self._admitted)
            return Plan(starts=(MixedStep(requests, ranges, self._total),), because=because)
        group = self._group(self._total)
        if self._can_pause(group, way, due_s):
            return Plan(
                starts=(group._replace(sms=self._share_in_pause(group, way)),), because="pause, then " + because
            )
        if way.kind == "sliced":
            ahead = self._decode.queued >= LANE_DEPTH
            return Plan(starts=() if ahead else (DecodeStep(self._total),), because=because)
        group = group._replace(sms=way.partition.prefill_sms)
        if self._prefill.steps:
            return Plan(starts=(group,), because=because)
        starts: list[Start] = [group]
        if self._decode.queued < LANE_DEPTH:
            starts.append(DecodeStep(way.partition.decode_sms))
        return Plan(starts=tuple(starts), because=because)

    @property
    def _at_risk(self) -> bool:
        return self._load > AT_RISK

    def _due_s(self, pace_: Pace, longer: float = 1.0) -> float:
        """When the next decode step must have ended: by the answers' slack, and `longer` times the longest gap after
        their last token."""
        last_token_s = self._outlook.decode_left_s if self._decode.steps else self._decode.free_s - self._snapshot.now_s
        return min(
            pace_.due_s + (pace_.allowance_s if self._at_risk else 0.0),
            last_token_s + longer * self._options.longest_gap * pace_.interval_s,
        )

    def _limit_s(self, pace_: Pace, longer: float = 1.0) -> float:
        """How long the next decode step may take from its start."""
        longest_s = longer * pace_.interval_s * (self._options.longest_gap if self._at_risk else 1.0)
        return min(max(self._due_s(pace_, longer) - self._outlook.decode_left_s, pace_.limit_s), longest_s)

    @property
    def _is_short(self) -> bool:
        return target_s(self._snapshot) < SHORT_TARGET_S

    @property
    def _most_ahead(self) -> int:
        """How many decode steps on a share may be on their way beside prefill. Prompts that end before the step under
        way does would have to wait for one that is queued behind it. If they outlast it, the next one begins without
        them in any case, and most of a millisecond sooner if it has been queued: that counts where the target is
        short."""
        outlook = self._outlook
        if self._is_short:
            return 1 if outlook.newcomers_s <= outlook.decode_left_s * (1.0 + SURELY_LATER) else LANE_DEPTH
        return 1 if outlook.newcomers_s < inf else LANE_DEPTH

    def _decode_beside(self, because: str) -> Plan:
        """Decode beside what the prefill lane has; a step that has the whole device is waited for."""
        groups = self._groups
        if not groups or self._decode.queued >= self._most_ahead or any(step.sms == self._total for step in groups):
            return Plan(because=because)
        return Plan(starts=(DecodeStep(self._snapshot.limits.lattice.decode_beside(groups[-1].sms)),), because=because)

    def _busiest(self, pace_: Pace) -> Way:
        """The way that does the most work per second: nobody waits for a target, and many prompts wait."""
        outlook, options = self._outlook, self._options
        splits = self._snapshot.limits.lattice.splits if "split" in options.ways else ()
        ways = [sliced(outlook), *(split(outlook, self._batch, partition) for partition in splits)]
        if prompts := self._mixable:
            ways += throughput.mixed_ways(outlook, prompts, outlook.mixed_rows, pace_.interval_s)
        return max(ways, key=lambda way: throughput.rate(way, self._worth_s) / self._discount(way))

    @property
    def _mixable(self) -> list[tuple[int, int]]:
        """Prompts for a mixed step, if there may be one, now or as soon as decode is no longer a step ahead."""
        if not (self._may_open_batch and "mixed" in self._options.ways):
            return []
        return [(entry.tokens_left, entry.computed_tokens) for entry in self._admitted]

    def _way(self, pace_: Pace) -> Way:
        """The cheapest way to run the next decode step that keeps the pace, else the balanced one. A step on the whole
        device waits for what the prefill lane has, longer than one on a share would: that counts as a part of it."""
        options, outlook, snapshot = self._options, self._outlook, self._snapshot
        limit_s = self._limit_s(pace_)
        wait_s = outlook.both_left_s - outlook.decode_left_s
        splits = snapshot.limits.lattice.splits if "split" in options.ways else ()
        split_ways: list[Way] | None = None
        mixed_ways: list[Way] = []
        prompts = self._mixable
        if prompts:
            most = MAX_BATCH_TOKENS - outlook.mixed_rows
            longest_s = self._limit_s(pace_, options.mixed_longer) - wait_s

            def most_price_s() -> float:
                nonlocal split_ways
                split_ways = splits_within(outlook, self._batch, splits, limit_s, self._decode.sms)
                return split_ways[0].price_s * (1.0 + SPLIT_LOSS) / (1.0 - HYSTERESIS) if split_ways else inf

            mixed_ways = mixed_within(outlook, prompts, outlook.mixed_rows, most, longest_s, most_price_s)
            if mixed_ways and mixed_ways[0].price_s < -SURELY_FREE * limit_s:
                return mixed_ways[0]  # no other way costs less than nothing, and what each costs need not be known
        if split_ways is None:
            split_ways = splits_within(outlook, self._batch, splits, limit_s, self._decode.sms)
        ways = [*split_ways, *mixed_ways]
        if ways:
            if "sliced" in options.ways and outlook.decode_alone_s + wait_s <= limit_s:
                ways.append(sliced(outlook))
            return cheapest(ways, self._with_loss)
        ways = [*(split(outlook, self._batch, partition) for partition in splits), sliced(outlook)]
        if prompts:
            ways.append(mixed(outlook, cut(prompts, self._batch_tokens)))
        return balanced(ways, limit_s, NEED_MARGIN * self._load, wait_s)

    def _discount(self, way: Way) -> float:
        """What is being done already counts as a little cheaper."""
        if way.kind == "mixed" or self._decode.mixed:
            same = way.kind == "mixed" and self._decode.mixed
        else:
            same = way.partition.decode_sms == self._decode.sms
        return 1.0 - HYSTERESIS if same else 1.0

    def _with_loss(self, way: Way) -> float:
        """The discount, and what a split loses when its batch begins and ends. A backlog has no such ends."""
        return self._discount(way) * (1.0 + SPLIT_LOSS if way.kind == "split" else 1.0)

    def _can_pause(self, group: PrefillGroup, way: Way, due_s: float) -> bool:
        """Whether a group on the whole device leaves time for a decode step before one is due. With a backlog there is
        no pause where a decode step adds to what is done."""
        if self._backlog and throughput.rate(way, self._worth_s) > 1.0:
            return False
        after_s = self._outlook.both_left_s + self._whole_s(group) + way.decode_s
        return self._options.pause == "yes" and after_s <= due_s

    def _whole_s(self, group: PrefillGroup) -> float:
        first, end = group.layer_range
        return self._batch.alone_s * (end - first) / self._snapshot.limits.num_layers

    def _share_in_pause(self, group: PrefillGroup, way: Way) -> int:
        """The whole device; a share where the group would wait for a decode step to end for longer than it gains."""
        waits_s = self._outlook.decode_left_s - self._outlook.prefill_left_s
        if way.kind != "split" or waits_s <= 0:
            return self._total
        share = way.partition.prefill_sms / self._total
        gains_s = max(0.0, self._whole_s(group) - waits_s) * (1.0 - share)
        return way.partition.prefill_sms if waits_s * share > gains_s else self._total
