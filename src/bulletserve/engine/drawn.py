"""What a step has drawn, on its way to the host, and what is told of it.

Knows nothing about devices: its tensors lie on the host, and may be filled in only when the step has run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bulletserve.core.token_rules import LEAST_LOGPROB, TokenLogprobs
from bulletserve.engine.ruled_seats import PromptRun
from bulletserve.kernels.token_rules import LogprobTensors, RuledRow


@dataclass(slots=True)
class Drawn:
    """tokens [R], in the launch's order (None: it draws none). logprobs: of some of them. prompts: pieces of prompts,
    each with the place in the prompt where it begins."""

    tokens: Tensor | None = None
    logprobs: list[tuple[Sequence[RuledRow], LogprobTensors]] = field(default_factory=list)
    prompts: list[tuple[PromptRun, LogprobTensors]] = field(default_factory=list)

    def token_ids(self) -> tuple[int, ...]:
        """The tokens. This and the others only once the step has run."""
        return () if self.tokens is None else tuple(self.tokens.tolist())

    def told(self) -> tuple[tuple[int, TokenLogprobs], ...]:
        """As in `StepDone.logprobs`."""
        return tuple(
            (row.row, one)
            for rows, tensors in self.logprobs
            for row, one in zip(rows, _each(tensors, [row.of.rules.logprobs for row in rows]), strict=True)
            if row.of.rules.logprobs is not None
        )

    def told_of_prompts(self) -> tuple[tuple[int, int, tuple[TokenLogprobs, ...]], ...]:
        """As in `StepDone.prompt_logprobs`."""
        return tuple(
            (run.part, run.first, tuple(_each(tensors, [run.most] * (run.end - run.first))))
            for run, tensors in self.prompts
        )


def _each(tensors: LogprobTensors, most: Sequence[int | None]) -> Iterator[TokenLogprobs]:
    floats = tensors.floats.nan_to_num(nan=LEAST_LOGPROB).clamp(min=LEAST_LOGPROB)  # NaN: nothing could be chosen
    for wanted, ints, values in zip(most, tensors.ints.tolist(), floats.tolist(), strict=True):
        end = 1 + (wanted or 0)
        yield TokenLogprobs(values[0], ints[0], tuple(ints[1:end]), tuple(values[1:end]))
