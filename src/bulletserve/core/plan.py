"""What to start now: the one thing a policy says and an executor hears.

Knows nothing about who made it. The rules a plan must keep are in `scheduler/plan_check`. No field exists for
one policy only.

A step that asks for all SMs is ordered behind whatever is queued on either lane; a step that asks for a share
is ordered behind its own lane alone. That one rule makes time slicing, mixed batches and side-by-side lanes
the same kind of plan.
"""

from enum import StrEnum
from typing import NamedTuple

from bulletserve.core.partition import Lattice


class Lane(StrEnum):
    """What carries steps."""

    PREFILL = "prefill"
    DECODE = "decode"


class PrefillGroup(NamedTuple):
    """Some layers of one prefill batch. `token_ranges[i]` is the half-open range of request i's tokens."""

    requests: tuple[int, ...]
    token_ranges: tuple[tuple[int, int], ...]
    layer_range: tuple[int, int]
    sms: int


class DecodeStep(NamedTuple):
    """One more token for every row."""

    sms: int


class MixedStep(NamedTuple):
    """A prefill chunk and the decode batch in one forward over all layers."""

    requests: tuple[int, ...]
    token_ranges: tuple[tuple[int, int], ...]
    sms: int


Start = PrefillGroup | DecodeStep | MixedStep


def lanes_of(start: Start) -> tuple[Lane, ...]:
    """The lanes on which a step counts, first the one that carries it: a mixed step is ordered like work of both."""
    if isinstance(start, MixedStep):
        return (Lane.PREFILL, Lane.DECODE)
    return (Lane.DECODE,) if isinstance(start, DecodeStep) else (Lane.PREFILL,)


def comes_after_both(start: Start, lattice: Lattice) -> bool:
    """Whether a step begins after whatever is queued on either lane. Where both lanes' only share is the whole device
    (streams that differ in priority alone), steps of one lane run side by side with the other's all the same."""
    return start.sms == lattice.total_sms and (isinstance(start, MixedStep) or not lattice.is_shared)


class Refusal(NamedTuple):
    """A request that is answered with an error instead of being run."""

    request_id: int
    reason: str
    retry_after_s: float | None = None


class Plan(NamedTuple):
    """What to do now: start steps, admit waiting requests, preempt running ones, refuse some.

    `because` is a short reason with the forecasts used, for logs and replays.
    """

    starts: tuple[Start, ...] = ()
    admit: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    refuse: tuple[Refusal, ...] = ()
    because: str = ""

    @property
    def is_empty(self) -> bool:
        """Nothing to do: every lane finishes what is queued, then idles."""
        return not (self.starts or self.admit or self.preempt or self.refuse)
