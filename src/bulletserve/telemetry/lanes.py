"""What the two lanes did: the definitions of every figure of a run's steps, in one place.

Knows nothing about requests.

- gap: the time between the ends of two successive steps with decode rows while rows stayed; an idle engine has none.
- both lanes: the time in which a step of its own ran on each lane; a mixed step, on both, is none of it.
- partition: at each moment the SMs of the step that runs on the prefill lane and on the decode lane, "100+32", 0 for a
  lane that idles; "mixed 132" while a mixed step runs, "idle" while nothing does. Its share is of the run's time.
- mixed steps: their share of all steps that ended.
- switches: steps on other SMs than the step before on their lane (that which carries them), a second.
- joules per token: mean watts over output tokens a second, prompts' energy included.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bulletserve.core.plan import Lane
from bulletserve.telemetry.timeline import StepSpan

_KEPT = 64
GAP_WINDOW_S = 60.0
"""The window of `longest_gap_s`."""


class LaneTimes:
    """Fed with each finished step, in the order in which steps finish."""

    def __init__(self) -> None:
        self.both_busy_s = 0.0
        self.busy_s = {Lane.PREFILL: 0.0, Lane.DECODE: 0.0}
        self.switches = 0
        self._sms: dict[Lane, int] = {}
        self._intervals: dict[Lane, deque[tuple[float, float]]] = {lane: deque(maxlen=_KEPT) for lane in Lane}
        self._last_tokens_s: float | None = None
        self._gaps: deque[tuple[float, float]] = deque()

    def observe(self, lane: Lane, started_s: float, finished_s: float, has_rows: bool, sms: int = 0) -> None:
        """A step ran on a lane, on `sms`, from `started_s` to `finished_s`; `has_rows`: it carried decode rows."""
        self.switches += self._sms.get(lane, sms) != sms
        self._sms[lane] = sms
        self.busy_s[lane] += finished_s - started_s
        other = Lane.DECODE if lane is Lane.PREFILL else Lane.PREFILL
        for start, end in reversed(self._intervals[other]):
            if end <= started_s:
                break
            self.both_busy_s += max(0.0, min(end, finished_s) - max(start, started_s))
        self._intervals[lane].append((started_s, finished_s))
        if has_rows:
            if self._last_tokens_s is not None:
                self._add_gap(finished_s, finished_s - self._last_tokens_s)
            self._last_tokens_s = finished_s

    def pause(self) -> None:
        """No row is left: the time to the next step is no gap."""
        self._last_tokens_s = None

    def longest_gap_s(self, now_s: float) -> float:
        """The longest gap that ended within the last `GAP_WINDOW_S` seconds."""
        while self._gaps and self._gaps[0][0] < now_s - GAP_WINDOW_S:
            self._gaps.popleft()
        return self._gaps[0][1] if self._gaps else 0.0

    def _add_gap(self, ended_s: float, gap_s: float) -> None:
        while self._gaps and self._gaps[-1][1] <= gap_s:
            self._gaps.pop()
        self._gaps.append((ended_s, gap_s))


@dataclass(frozen=True, slots=True)
class LaneUse:
    """Of the steps of a run; `partitions`: share of the time by partition, the largest first; `both_share`: that of
    the time in which both lanes ran. nan without steps."""

    mixed_share: float
    switches_per_s: float
    partitions: dict[str, float]
    both_share: float


def lane_use(spans: Sequence[StepSpan], began_s: float, ended_s: float) -> LaneUse:
    """Of the steps that ended between two moments, in the order of their ends."""
    steps = [span for span in spans if began_s < span.finished_s <= ended_s]
    last: dict[Lane, int] = {}
    switches = 0
    for span in steps:
        switches += last.get(span.lanes[0], span.sms) != span.sms
        last[span.lanes[0]] = span.sms
    shares: defaultdict[str, float] = defaultdict(float)
    both = 0.0
    for seconds, running in _course(spans, began_s, ended_s):
        share = seconds / (ended_s - began_s)
        shares[_partition(running)] += share
        both += share * ({"prefill", "decode"} <= {span.kind for span in running})
    mixed = sum(span.kind == "mixed" for span in steps)
    return LaneUse(
        mixed / len(steps) if steps else float("nan"),
        switches / (ended_s - began_s),
        dict(sorted(shares.items(), key=lambda item: -item[1])),
        both,
    )


def joules_per_token(watts: float, tokens_per_s: float) -> float:
    """nan where either is not known."""
    return watts / tokens_per_s if tokens_per_s else float("nan")


def _course(spans: Iterable[StepSpan], began_s: float, ended_s: float) -> Iterator[tuple[float, list[StepSpan]]]:
    """How long which steps ran, moment after moment; a step that began later stands later."""
    ran = [span for span in spans if span.finished_s > span.started_s]
    moments = [(span.started_s, 1, span) for span in ran] + [(span.finished_s, 0, span) for span in ran]
    running: list[StepSpan] = []
    at_s = began_s
    for moment_s, begins, span in sorted(moments, key=lambda one: one[:2]):
        until_s = min(max(moment_s, began_s), ended_s)
        if until_s > at_s:
            yield until_s - at_s, running
            at_s = until_s
        if begins:
            running.append(span)
        else:
            running.remove(span)
    if ended_s > at_s:
        yield ended_s - at_s, running


def _partition(running: Sequence[StepSpan]) -> str:
    sms = {span.kind: span.sms for span in running}
    if "mixed" in sms:
        return f"mixed {sms['mixed']}"
    return f"{sms.get('prefill', 0)}+{sms.get('decode', 0)}" if sms else "idle"
