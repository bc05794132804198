"""`bullet`: both lanes at once, the partition chosen anew at each layer group and decode step.

The paper's scheduler and beyond: at each decision the ways to go on (`scheduler/ways`: every split of the lattice, a time
slice, a mixed step of any size) are compared by forecast, and the cheapest that keeps the answers' pace is taken.
"""

from dataclasses import dataclass
from typing import ClassVar

from bulletserve.core.plan import DecodeStep, MixedStep, Plan, PrefillGroup, Start
from bulletserve.core.snapshot import LANE_DEPTH, MAX_RANGE_TOKENS, Snapshot
from bulletserve.scheduler.batching import admissions, make_room, next_group
from bulletserve.scheduler.decode_pace import pace
from bulletserve.scheduler.outlook import Outlook
from bulletserve.scheduler.policy import Forecaster, QueueParts
from bulletserve.scheduler.prompt_order import Entry, PromptOrder, prompt_order, tokens_left
from bulletserve.scheduler.ways import Way, mixed_within, sliced, splits_within

HYSTERESIS = 0.05


@dataclass(frozen=True)
class Bullet(QueueParts):
    """Options."""

    ordering: str = "slack"
    admission: str = "timely"
    margin: float = 0.05
    gap: float = 3.0
    theta: float = 0.2
    urgent: float = 0.6
    catch: float = 0.7
    use: str = "split+sliced+mixed"
    batch: int = 1024
    name: ClassVar[str] = "bullet"
    needs_forecasts: ClassVar[bool] = True

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        return _Decision(self, snapshot, estimator).plan()


class _Decision:
    def __init__(self, options: Bullet, snapshot: Snapshot, estimator: Forecaster) -> None:
        self.o = options
        self.s = snapshot
        self.look = Outlook(snapshot, estimator)
        self.total = self.look.total_sms
        self.P, self.D = snapshot.prefill_lane, snapshot.decode_lane

    def plan(self) -> Plan:
        s = self.s
        victims, rows, missing = make_room(s)
        if victims or (missing > 0 and s.decode_rows):
            if victims:
                return Plan(preempt=victims, because=f"{missing} blocks are missing")
        can_decode = s.decode_rows > 0 and missing <= 0
        order = None
        if s.prefill is None and self.P.queued < LANE_DEPTH and (s.admitted or s.waiting or s.late):
            order = prompt_order(s, self.look.token_s / 0.9, self.look.prefill_left_s)
            batch = self.batch(order, self.o.batch)
            new = [e for e in batch if not hasattr(e, "computed_tokens")]
            if new:
                admit = admissions(s, sum(tokens_left(e) for e in batch), new)
                if admit:
                    return Plan(admit=admit, because="next batch")
        if not can_decode:
            return self.prefill_alone(order)
        has_work = s.prefill is not None or bool(s.admitted)
        if not has_work:
            return self.decode_on()
        return self.both(order)

    def batch(self, order: PromptOrder, tokens: int) -> list[Entry]:
        """The first prompts until there are enough tokens."""
        chosen: list[Entry] = []
        have = 0
        for entry in (*order.in_time, *order.others):
            if have >= tokens:
                break
            left = min(tokens_left(entry), MAX_RANGE_TOKENS)
            if chosen and have + left > 2 * tokens:
                break
            chosen.append(entry)
            have += left
        return chosen

    def admitted_first(self, order: PromptOrder | None) -> list:
        if order is None:
            return []
        return [e for e in (*order.in_time, *order.others) if hasattr(e, "computed_tokens")]

    def group(self, order: PromptOrder | None, sms: int) -> PrefillGroup | None:
        if self.P.queued >= LANE_DEPTH:
            return None
        if self.s.prefill is not None:
            return next_group(self.s, 0, sms)
        entries = self.admitted_first(order)
        n = 0
        have = 0
        for e in entries:
            left = min(tokens_left(e), MAX_RANGE_TOKENS)
            if (n and have + left > 2 * self.o.batch) or have >= self.o.batch:
                break
            n += 1
            have += left
        return next_group(self.s, max(have, 1), sms, entries=entries[:n])

    def prefill_alone(self, order: PromptOrder | None) -> Plan:
        if self.s.prefill is None and not self.s.admitted:
            return Plan(because="nothing")
        g = self.group(order, self.total)
        return Plan(starts=(g,) if g else (), because="prefill alone")

    def decode_on(self) -> Plan:
        """No prompt left to start."""
        s, D, P = self.s, self.D, self.P
        if D.queued >= LANE_DEPTH:
            return Plan(because="a step ahead")
        if (P.steps and s.prefilling_rows) or P.steps:
            first = P.steps[0]
            if first.sms == self.total:
                # whole prefill finishing: newcomers join after; wait unless due
                return Plan(because="newcomers join soon")
            if D.queued:
                return Plan(because="newcomers join soon")
            sms = self.partner(first.sms)
            return Plan(starts=(DecodeStep("all", sms),), because="beside the last group")
        return Plan(starts=(DecodeStep("all", self.total),), because="decode alone")

    def is_current(self, w: Way) -> bool:
        if w.kind == "mixed":
            return self.D.mixed
        if w.kind == "split":
            return not self.D.mixed and self.D.sms == w.partition.decode_sms
        return not self.D.mixed and self.D.sms == self.total

    def partner(self, prefill_sms: int) -> int:
        for p in self.s.limits.lattice.splits:
            if p.prefill_sms == prefill_sms:
                return p.decode_sms
        return self.total

    def both(self, order: PromptOrder | None) -> Plan:
        s, o, look = self.s, self.o, self.look
        if self.P.queued >= LANE_DEPTH and self.D.queued >= LANE_DEPTH:
            return Plan(because="full")
        if self.P.queued >= LANE_DEPTH:
            if any(step.sms == self.total for step in self.P.steps):
                return Plan(because="prefill has the device")
            return Plan(starts=(DecodeStep("all", self.partner(self.P.steps[-1].sms)),), because="beside")
        if s.prefill is not None:
            prompts = [(end - start, start) for start, end in s.prefill.token_ranges]
            batch = look.prefill(prompts)
            done = s.prefill.next_layer / s.limits.num_layers
        else:
            entries = self.admitted_first(order)
            allprompts = [(tokens_left(e), e.computed_tokens) for e in entries]
            have, prompts = 0, []
            for new, before in allprompts:
                new = min(new, MAX_RANGE_TOKENS)
                if prompts and (have >= o.batch or have + new > 2 * o.batch):
                    break
                prompts.append((new, before))
                have += new
            batch = look.prefill(prompts)
            done = 0.0
        p = pace(s, look.decode_alone_s, o.margin)
        start = look.decode_left_s
        prev_end = start if self.D.steps else self.D.free_s - s.now_s
        base = p.interval_s
        load = order.load if order is not None else 0.0
        if s.prefill is not None:
            load = (1 - done) * look.seconds(batch, look.whole) / max(1e-3, s.prefill.deadline_s - s.now_s)
            w = look.token_s * s.waiting_tokens
        allowance = o.theta * s.answer_tokens * max(0.0, base - look.decode_alone_s)
        is_urgent = load > o.urgent
        high = o.gap if is_urgent else 1.0
        low = o.catch if p.due_s - start + allowance < base else 1.0
        due = min(p.due_s + (allowance if is_urgent else 0.0), prev_end + o.gap * base)
        limit = min(max(due - start, low * base), high * base)
        partitions = sorted(s.limits.lattice.splits, key=lambda x: -x.decode_sms)
        ways: list[Way] = []
        if "split" in o.use:
            ways += splits_within(look, batch, partitions, limit)
        if "sliced" in o.use or not ways:
            ways.append(sliced(look))
        can_mix = s.prefill is None and max(self.P.queued, self.D.queued) < LANE_DEPTH and "mixed" in o.use
        if can_mix:
            lim = min(max(due - look.both_left_s, low * base), high * base)
            ways += mixed_within(look, allprompts, s.decode_rows, 8192 - s.decode_rows, lim)
        fit = [w for w in ways if w.decode_s <= limit] or [min(ways, key=lambda w: w.decode_s)]
        way = min(fit, key=lambda w: w.price_s * (1.0 - HYSTERESIS * self.is_current(w)))
        because = f"{way.describe()}; due in {due * 1e3:.1f}, load {load:.2f}"
        if way.kind == "mixed":
            entries = self.admitted_first(order)
            reqs, ranges, t = [], [], way.tokens
            for e in entries:
                if t <= 0:
                    break
                n = min(t, tokens_left(e), MAX_RANGE_TOKENS)
                reqs.append(e.request_id)
                ranges.append((e.computed_tokens, e.computed_tokens + n))
                t -= n
            return Plan(starts=(MixedStep(tuple(reqs), tuple(ranges), "all", self.total),), because=because)
        starts: list[Start] = []
        # prefill lane
        whole_running = bool(self.P.steps) and self.P.steps[-1].sms == self.total
        decode_next = self.D.queued < LANE_DEPTH
        if self.P.queued < LANE_DEPTH:
            g = self.group(order, self.total)
            if g is not None:
                layers = g.layer_range[1] - g.layer_range[0]
                took = look.seconds(batch, look.whole) * layers / s.limits.num_layers
                if look.both_left_s + took + way.decode_s <= due:
                    lost = look.decode_left_s - look.prefill_left_s
                    if way.kind == "split" and lost > 0:
                        share = way.partition.prefill_sms / self.total
                        if lost * share > max(0.0, took - lost) * (1 - share):
                            g = g._replace(sms=way.partition.prefill_sms)
                    return Plan(starts=(g,), because="pause: " + because)
                if way.kind == "split":
                    starts.append(g._replace(sms=way.partition.prefill_sms))
                elif way.kind == "sliced":
                    if self.D.queued < LANE_DEPTH:
                        return Plan(starts=(DecodeStep("all", self.total),), because=because)
                    return Plan(because="sliced: decode queued")
        # decode lane
        if self.D.queued < LANE_DEPTH:
            if self.P.steps:
                first = self.P.steps[0].sms
                if first == self.total:
                    if way.kind == "sliced" and not starts:
                        starts.append(DecodeStep("all", self.total))
                elif self.P.steps[-1].sms != self.total:
                    starts.append(DecodeStep("all", self.partner(self.P.steps[-1].sms)))
            elif starts:
                starts.append(DecodeStep("all", way.partition.decode_sms))
        return Plan(starts=tuple(starts), because=because)
