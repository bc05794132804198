"""A point to measure: what each lane runs, on which share. One or two samples come of it.

Knows nothing about how points are chosen (`design`) or measured (`profiler`).
"""

from dataclasses import dataclass

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.profiling.sources import PROMPT_SEATS, mixed_seats

KINDS = ("prefill", "decode", "mixed", "co-run")


@dataclass(frozen=True, slots=True)
class PromptLoad:
    """A batch of `count` prompts, each of `new` tokens behind `cached` ones that are in the cache already."""

    count: int
    new: int
    cached: int = 0

    @property
    def tokens(self) -> int:
        """Length of one prompt."""
        return self.cached + self.new


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """`rows` rows with `context` tokens each in the cache, on average."""

    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to measure. With both loads and `partition.decode_sms` 0 it is a mixed step of both."""

    partition: Partition
    prompts: PromptLoad | None = None
    rows: DecodeLoad | None = None

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.prompts is not None and self.rows is not None:
            return "co-run" if self.partition.decode_sms else "mixed"
        return "decode" if self.prompts is None else "prefill"

    @property
    def samples(self) -> int:
        """How many samples come of it: one per lane that runs."""
        return 2 if self.kind == "co-run" else 1

    @property
    def seats(self) -> int:
        """Seats that its sources take."""
        return (self.rows.rows if self.rows else 0) + self._prompt_seats

    def cache_tokens(self, slack_tokens: int) -> int:
        """Room that its sources take in the cache, where a row needs `slack_tokens` beyond its mean context."""
        rows = self.rows.rows * (self.rows.context + slack_tokens) if self.rows else 0
        return rows + (self._prompt_seats * self.prompts.tokens if self.prompts else 0)

    @property
    def _prompt_seats(self) -> int:
        if self.prompts is None:
            return 0
        return mixed_seats(1, 1) if self.kind == "mixed" else PROMPT_SEATS * self.prompts.count

    def describe(self) -> str:
        """For people: "decode 64x1024 on 32 beside prefill 2x512+1024 on 100"."""
        total = max(self.partition.prefill_sms, self.partition.decode_sms)
        rows = f"{self.rows.rows}x{self.rows.context}" if self.rows else ""
        prompts = f"{self.prompts.count}x{self.prompts.new}" if self.prompts else ""
        prompts += f"+{self.prompts.cached}" if self.prompts and self.prompts.cached else ""
        if self.kind == "mixed":
            return f"mixed {prompts} with {rows} on {total}"
        if self.kind == "co-run":
            return (
                f"decode {rows} on {self.partition.decode_sms} beside prefill {prompts} on {self.partition.prefill_sms}"
            )
        return f"{self.kind} {rows or prompts} on {total}"

    def prefill_step(self, layers: int) -> StepShape | None:
        """What the prefill lane repeats, all `layers` of a batch as one step; None where only rows decode."""
        if self.prompts is None:
            return None
        load = self.prompts
        rows, context = self._attended if self.kind == "mixed" else (0, 0)
        return StepShape.mixed([(load.new, load.cached)] * load.count, rows, context, layers, load.count + rows)

    def decode_step(self, layers: int) -> StepShape | None:
        """What the decode lane runs, None where it runs nothing of its own."""
        if self.rows is None or self.kind == "mixed":
            return None
        return StepShape.decode(*self._attended, layers)

    @property
    def _attended(self) -> tuple[int, int]:
        """Rows, and the tokens they attend to: those in the cache and their own."""
        return (self.rows.rows, self.rows.rows * (self.rows.context + 1)) if self.rows else (0, 0)
