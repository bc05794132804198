"""What the device's clock (or, without one, the host's) says about the steps of two lanes: periods, durations, gaps.

Knows nothing about devices: arithmetic over when steps began and ended. A figure of one lane beside another is taken
only from the time in which both were busy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median, stdev
from typing import NamedTuple

from bulletserve.core.launch import Launch
from bulletserve.core.plan import PrefillGroup

STANDARD_ERROR = 0.005
"""A mean of repeated steps is good enough when it is known so well."""

_LEAST_SEEN = 4  # repeats that say how much they differ


class TooFewSteps(RuntimeError):
    """A run that saw too little to give a figure."""


class StepTime(NamedTuple):
    """One step in ms of the device's clock; `gap_ms` since the lane's step before it. `late`: the device had ended
    that one when this was launched."""

    launch: Launch
    start_ms: float
    end_ms: float
    gap_ms: float
    late: bool = False


@dataclass(frozen=True, slots=True)
class LaneFigures:
    """A lane over a window.

    `period_ms`: from the start of one step to that of the next, on average. `step_ms`: durations on the device.
    `gaps_ms`: idle time before each step. `prompt_ms`: from the start of a prompt (or batch of prompts) to that of the
    next, nan where fewer than two began. `prompt_tokens_s` prompt tokens a second over whole prompts. `late`: share of
    steps that were launched too late.
    """

    steps: int
    period_ms: float
    step_ms: tuple[float, ...]
    gaps_ms: tuple[float, ...]
    prompt_ms: float
    prompt_tokens_s: float
    late: float

    @property
    def median_ms(self) -> float:
        """A step's usual duration on the device."""
        return median(self.step_ms)


def common_window(lanes: Sequence[Sequence[StepTime]]) -> tuple[float, float]:
    """From the moment when all lanes have begun to the first end of a lane's work."""
    return max(steps[0].start_ms for steps in lanes), min(steps[-1].end_ms for steps in lanes)


def figures(steps: Sequence[StepTime], window: tuple[float, float]) -> LaneFigures:
    """Of the steps that lie in `window`. Raises `TooFewSteps` with fewer than two."""
    inside = [step for step in steps if window[0] <= step.start_ms and step.end_ms <= window[1]]
    if len(inside) < 2:
        raise TooFewSteps(f"{len(inside)} of {len(steps)} steps lie in the {window[1] - window[0]:.1f} ms measured")
    nan = float("nan")
    starts = [step.start_ms for step in inside if begins_prompt(step.launch)]
    span_ms = inside[-1].start_ms - inside[0].start_ms
    prompt_ms = (starts[-1] - starts[0]) / (len(starts) - 1) if len(starts) > 1 else nan
    if isinstance(inside[0].launch.step, PrefillGroup):
        whole = [step.launch for step in inside if starts and starts[0] <= step.start_ms < starts[-1]]
        tokens_s = sum(map(new_tokens, whole)) / (len(starts) - 1) / prompt_ms * 1e3 if len(starts) > 1 else nan
    else:
        tokens_s = sum(tokens_of(step.launch) for step in inside[:-1]) / span_ms * 1e3
    return LaneFigures(
        steps=len(inside),
        period_ms=span_ms / (len(inside) - 1),
        step_ms=tuple(step.end_ms - step.start_ms for step in inside),
        gaps_ms=tuple(step.gap_ms for step in inside[1:]),
        prompt_ms=prompt_ms,
        prompt_tokens_s=tokens_s,
        late=sum(step.late for step in inside) / len(inside),
    )


def window_s(starts_ms: Sequence[float], shortest_s: float, longest_s: float) -> float:
    """How long steps (or whole prompts) must be watched for a mean with `STANDARD_ERROR`, going by when a few began.

    As long as may be where they are too few to tell.
    """
    periods_ms = [after - before for before, after in pairwise(starts_ms)]
    if len(periods_ms) < _LEAST_SEEN:
        return longest_s
    usual_ms = mean(periods_ms)
    wanted = (stdev(periods_ms) / usual_ms / STANDARD_ERROR) ** 2
    return min(longest_s, max(shortest_s, wanted * usual_ms / 1e3))


def begins_prompt(launch: Launch) -> bool:
    """The first step of a prompt: the one that seats it."""
    return bool(launch.parts) and any(seat.seat == launch.parts[0].seat for seat in launch.seats)


def tokens_of(launch: Launch) -> int:
    """Prompt tokens of a step."""
    return sum(part.end - part.start for part in launch.parts)


def new_tokens(launch: Launch) -> int:
    """Prompt tokens that a layer group is the first to work on: those of a group that begins with layer 0."""
    step = launch.step
    return tokens_of(launch) if isinstance(step, PrefillGroup) and step.layer_range[0] == 0 else 0
