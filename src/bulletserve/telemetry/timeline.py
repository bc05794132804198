"""What each lane ran when, on how many SMs and why: the record behind strips and traces.

Knows nothing about requests. An observer of `scheduler/loop`: steps get their numbers in the order in which plans start
them, so the plans and the ends are enough. `perfetto` is Chrome's trace event format, which ui.perfetto.dev opens.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from bulletserve.core.events import Event, StepDone
from bulletserve.core.plan import DecodeStep, Lane, MixedStep, Plan, Start, lanes_of


class StepSpan(NamedTuple):
    """One step that has run. `kind`: prefill, decode or mixed. `prompt_tokens`: of its prompts; `drawn`: tokens that it
    drew; `because`: the plan's reason."""

    kind: str
    lanes: tuple[Lane, ...]
    sms: int
    started_s: float
    finished_s: float
    prompt_tokens: int
    drawn: int
    because: str


class Timeline:
    """Collects the steps of a run, in the order of their ends; failed ones too."""

    def __init__(self) -> None:
        self.spans: list[StepSpan] = []
        self._numbers = count()
        self._started: dict[int, tuple[Start, str]] = {}

    def __call__(self, now_s: float, events: Sequence[Event], plans: Sequence[Plan]) -> None:
        """One turn."""
        for event in events:
            if isinstance(event, StepDone):
                self.spans.append(_span(event, *self._started.pop(event.step_id)))
        for plan in plans:
            for start in plan.starts:
                self._started[next(self._numbers)] = (start, plan.because)


def _span(done: StepDone, start: Start, because: str) -> StepSpan:
    prompt_tokens = 0 if isinstance(start, DecodeStep) else sum(end - first for first, end in start.token_ranges)
    kind = "mixed" if isinstance(start, MixedStep) else str(lanes_of(start)[0])
    return StepSpan(
        kind, lanes_of(start), start.sms, done.started_s, done.finished_s, prompt_tokens, len(done.tokens), because
    )


def write_perfetto(path: Path, runs: Iterable[tuple[str, Sequence[StepSpan]]]) -> None:
    """A trace with a process for each run and a track for each lane; a mixed step is on both lanes."""
    events: list[dict[str, Any]] = []
    for process, (name, spans) in enumerate(runs, 1):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for thread, lane in enumerate(Lane, 1):
            told = {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": f"{lane} lane"}}
            events.append(told)
            where = {"pid": process, "tid": thread}
            events += [_slice(span) | where for span in spans if lane in span.lanes]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _slice(span: StepSpan) -> dict[str, Any]:
    what = [f"{span.prompt_tokens} prompt tokens"] if span.prompt_tokens else []
    what += [f"{span.drawn} drawn"] if span.drawn else []
    return {
        "ph": "X",
        "name": f"{span.kind} on {span.sms}: {', '.join(what) or 'layers'}",
        "cat": span.kind,
        "ts": round(span.started_s * 1e6, 3),
        "dur": round((span.finished_s - span.started_s) * 1e6, 3),
        "args": {"sms": span.sms, "because": span.because},
    }
