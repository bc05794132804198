"""The forecasts of one decision, corrected, and what they say about the steps under way.

Knows nothing about what is better. Seconds from now; a lane's share is what a step on it would get.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.snapshot import LaneState, Snapshot, StepUnderWay
from bulletserve.scheduler.once import once
from bulletserve.scheduler.policy import Forecaster

Prompts = Sequence[tuple[int, int]]
"""(new tokens, tokens before them) of each prompt."""


class Batch(NamedTuple):
    """A prefill batch over all layers, and how long the whole device takes for it."""

    shape: StepShape
    alone_s: float


class Outlook:
    """What the steps that a snapshot allows would take."""

    def __init__(self, snapshot: Snapshot, estimator: Forecaster) -> None:
        self._snapshot, self._estimator = snapshot, estimator
        self.total_sms = snapshot.limits.lattice.total_sms
        self._layers = snapshot.limits.num_layers
        self.whole = Partition(self.total_sms, self.total_sms)

    def seconds(self, shape: StepShape, partition: Partition, beside: StepShape | None = None) -> float:
        """How long a step takes on its lane's share, by itself or beside another."""
        found = self._estimator.predict(shape, partition, beside)
        return found.seconds * self._snapshot.correction.of(shape.kind, beside=beside is not None)

    @once
    def decode(self) -> StepShape:
        """The next decode step. There must be rows."""
        rows = self._snapshot.decode_rows
        return StepShape.decode(rows, self._snapshot.decode_tokens + rows, self._layers)

    @once
    def decode_alone_s(self) -> float:
        """The next decode step on the whole device."""
        return self.seconds(self.decode, self.whole)

    def batch(self, prompts: Prompts) -> Batch:
        """A prefill batch of prompts that end with it."""
        shape = StepShape.prefill(prompts, self._layers, len(prompts))
        return Batch(shape, self.seconds(shape, self.whole))

    def mixed_s(self, prompts: Prompts) -> float:
        """A mixed step of these prompts and the decode rows."""
        rows = self.mixed_rows
        shape = StepShape.mixed(prompts, rows, self._mixed_context, self._layers, rows + len(prompts))
        return self.seconds(shape, self.whole)

    @once
    def mixed_rows(self) -> int:
        """Decode rows of the next mixed step: those that there are, and the prompts that end in groups before it."""
        return self.decode.decode_rows + sum(shape.sampled for shape in self._ending)

    @once
    def _mixed_context(self) -> int:
        return self.decode.decode_context + sum(shape.prefill_context + shape.sampled for shape in self._ending)

    @once
    def _ending(self) -> list[StepShape]:
        """The groups under way that end prompts. (Those that end in a mixed step are rows already.)"""
        shapes = [step.shape for step in self._snapshot.prefill_lane.steps]
        return [shape for shape in shapes if shape.sampled and shape.kind == "prefill"]

    @once
    def token_s(self) -> float:
        """A prompt token in a batch that keeps the whole device busy."""
        tokens = self._snapshot.limits.batch_tokens
        return self.seconds(_one_prompt(tokens, self._layers), self.whole) / tokens

    @once
    def prefill_left_s(self) -> float:
        """Until the prefill lane has run what it has."""
        return sum(self._prefill_each_left_s)

    @once
    def decode_left_s(self) -> float:
        """Until the decode lane has run what it has."""
        return sum(self._decode_each_left_s)

    @once
    def newcomers_s(self) -> float:
        """Until the first prefill group that ends prompts has run; infinite if none does. (Prompts that end in a mixed
        step are rows of the next one, whenever that is planned.)"""
        left_s = 0.0
        for step, each_s in zip(self._snapshot.prefill_lane.steps, self._prefill_each_left_s, strict=True):
            left_s += each_s
            if step.shape.sampled and step.shape.kind == "prefill":
                return left_s
        return inf

    @once
    def ends_with_newcomers(self) -> bool:
        """Whether prompts end, and a step on the whole device would wait for nothing that decode could go on beside."""
        alone = all(step.sms == self.total_sms for step in self._snapshot.prefill_lane.steps)
        return self.newcomers_s < inf and (alone or self.prefill_left_s <= self.decode_left_s)

    @once
    def both_left_s(self) -> float:
        """Until a step on the whole device could begin: those that have all of it run one after the other, whichever
        lane they are on."""
        prefill = self._snapshot.prefill_lane.steps, self._prefill_each_left_s
        decode = self._snapshot.decode_lane.steps, self._decode_each_left_s
        shared_s, alone_s = [0.0, 0.0], 0.0
        for place, (steps, each_left_s) in enumerate((prefill, decode)):
            for step, left_s in zip(steps, each_left_s, strict=True):
                if step.sms < self.total_sms or step.shape.kind == "mixed":
                    shared_s[place] += left_s
                else:
                    alone_s += left_s
        return alone_s + max(shared_s)

    @once
    def _prefill_each_left_s(self) -> list[float]:
        return self._each_left_s(self._snapshot.prefill_lane, self._snapshot.decode_lane)

    @once
    def _decode_each_left_s(self) -> list[float]:
        return self._each_left_s(self._snapshot.decode_lane, self._snapshot.prefill_lane)

    def _each_left_s(self, lane: LaneState, other: LaneState) -> list[float]:
        """Of each step of a lane, by itself."""
        if not lane.steps:
            return []
        beside = other.steps[0] if other.steps else None
        first, *others = [self._under_way_s(step, beside) for step in lane.steps]
        return [max(0.0, first - (self._snapshot.now_s - lane.steps[0].since_s)), *others]

    def _under_way_s(self, step: StepUnderWay, beside: StepUnderWay | None) -> float:
        shape, sms = step.shape, step.sms
        total = self.total_sms
        if beside is None or sms == total or beside.sms == total or shape.kind == beside.shape.kind:
            return self.seconds(shape, Partition(sms, sms))
        if shape.kind == "mixed" or beside.shape.kind == "mixed":
            return self.seconds(shape, Partition(sms, sms))
        partition = Partition(sms, beside.sms) if shape.kind == "prefill" else Partition(beside.sms, sms)
        return self.seconds(shape, partition, beside.shape)


@lru_cache(maxsize=4)
def _one_prompt(tokens: int, layers: int) -> StepShape:
    return StepShape.prefill([(tokens, 0)], layers, 1)
