"""The end of a step: final norm, head, the choice of tokens, and what that leaves in the seats' tables.

Knows nothing about layers. The tokens of chosen rows are drawn on the device and stay there for the next step; a copy
goes to the host.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bulletserve.core.token_rules import MOST_LOGPROBS, TokenRules
from bulletserve.engine.cuda.seat_tables import CudaSeats
from bulletserve.engine.drawn import Drawn
from bulletserve.engine.masked import MaskedRow
from bulletserve.kernels.cuda.penalties import penalise
from bulletserve.kernels.cuda.sampling import sample
from bulletserve.kernels.cuda.step_tables import finish
from bulletserve.kernels.masks import keep_allowed, to_device
from bulletserve.kernels.token_rules import LogprobTensors, RuledRow, RuledRows, RulesOfSeat, logprobs
from bulletserve.models.cuda_operators import CudaStepContext, LaneWorkspace
from bulletserve.models.decoder import Decoder


class Tail:
    """Draws one lane's tokens, up to `max_rows` a step; `tokens` int32 [max_rows] holds the last step's."""

    def __init__(self, model: Decoder, seats: CudaSeats, workspace: LaneWorkspace, max_rows: int) -> None:
        self._model = model
        self._seats = seats
        self._workspace = workspace
        self._scratch = workspace.sampling
        self.tokens = torch.zeros(max_rows, dtype=torch.int32, device=model.device)

    def draw(self, hidden: Tensor, rows: Tensor, live: Tensor, lengths: Tensor, context: CudaStepContext) -> None:
        """The next token of seats `rows` int32 [R] from `hidden` [R, H]; the first `live` int32 [1] are real.

        `lengths` int32 [R]: tokens in the cache of each seat after this step, which is the sampled token's position.
        """
        seats = self._seats.device
        tokens = self.tokens[: rows.shape[0]]
        logits = self._model.logits(hidden, context)
        sample(logits, rows, live, seats, lengths, tokens, self._scratch, context.sms)
        finish(rows, live, tokens, lengths, seats)

    def redraw(self, ruled: Sequence[RuledRow], sms: int, drawn: Drawn) -> None:
        """Draw the tokens of rows with rules again, from the logits that the step has just left in the workspace.

        A checkpoint may give every request a penalty: where all rows of a step ask for nothing else, nothing is copied,
        and the launches are as many for all of them as for one.
        """
        penalised = [one for one in ruled if one.of.only_penalises]
        if penalised and penalised[-1].row + 1 == len(penalised):  # the step's first rows
            self._redraw_penalised(penalised, sms, copied=False)
        else:
            for start in range(0, len(penalised), _AT_ONCE):
                self._redraw_penalised(penalised[start : start + _AT_ONCE], sms, copied=True)
        others = [one for one in ruled if not one.of.only_penalises]
        for start in range(0, len(others), _AT_ONCE):
            self._redraw(others[start : start + _AT_ONCE], sms, drawn)

    def _redraw_penalised(self, ruled: Sequence[RuledRow], sms: int, *, copied: bool) -> None:
        history, every = self._seats.history, self._workspace.logits
        rows = RuledRows(ruled, every.shape[1], every.device)
        narrow, positions = rows.seats.int(), rows.positions.int()
        logits = every[rows.at] if copied else every[: len(ruled)]
        penalise(logits, narrow, history.token_counts, history.penalties)
        live = torch.full((1,), len(ruled), dtype=torch.int32, device=every.device)
        out = torch.empty(len(ruled), dtype=torch.int32, device=every.device)
        sample(logits, narrow, live, self._seats.ruled_device, positions, out, self._scratch, sms)
        history.note(rows.seats, out.long())
        self._replace(rows, out, out)

    def _replace(self, rows: RuledRows, tokens: Tensor, told: Tensor) -> None:
        self.tokens.index_copy_(0, rows.at, told)
        self._seats.device.last_token.index_copy_(0, rows.seats, tokens)

    def _redraw(self, ruled: Sequence[RuledRow], sms: int, drawn: Drawn) -> None:
        seats = self._seats.ruled_device
        every = self._workspace.logits
        rows = RuledRows(ruled, every.shape[1], every.device)
        narrow, positions = rows.seats.int(), rows.positions.int()
        live = torch.full((1,), len(ruled), dtype=torch.int32, device=every.device)
        out = torch.empty(len(ruled), dtype=torch.int32, device=every.device)

        def draw(logits: Tensor) -> Tensor:
            sample(logits, narrow, live, seats, positions, out, self._scratch, sms)
            return out.long()

        chosen = rows.draw(every[rows.at], self._seats.history, seats.temperature[rows.seats], draw)
        self._replace(rows, out, chosen.told.int())
        if chosen.logprobs is not None:
            drawn.logprobs.append((ruled, to_host(chosen.logprobs)))

    def of_prompt(
        self, hidden: Tensor, targets: Tensor, most: int, context: CudaStepContext, rows: int
    ) -> LogprobTensors:
        """What is told of prompt tokens `targets` int64 [R], predicted from `hidden` [R, H]; on the host, in time.

        The product is one over `rows` rows, whatever R, because that is what has been compiled. Overwrites the logits.
        """
        sampled, count = self._workspace.sampled[:rows], len(targets)
        sampled[:count].copy_(hidden)
        return to_host(logprobs(self._model.logits(sampled, context)[:count], targets, most))

    def warm(self, sms: int) -> None:
        """Compile and load what rows with rules need, on the padding seat."""
        rules = TokenRules((0, 1), ((0, 1), (1,)), 9, (0,), ((0, 0.0),), 1.5, 0.5, 0.5, 0.5, MOST_LOGPROBS)
        spare = self._seats.max_seqs
        for some in (rules, TokenRules(repetition_penalty=1.5)):
            self._seats.history.take(spare, some, (0, 1), 1)
            self.redraw([RuledRow(0, spare, 2, RulesOfSeat.of(some, 1))], sms, Drawn())

    def redraw_masked(self, masked: Sequence[MaskedRow], sms: int) -> None:
        """Draw again, for rows with masks, from the logits that the step has just left in the workspace.

        These lose there what is not allowed. The seats' lengths on the host must be those after the step.
        """
        for start in range(0, len(masked), _AT_ONCE):
            self._redraw_masked(masked[start : start + _AT_ONCE], sms)

    def _redraw_masked(self, masked: Sequence[MaskedRow], sms: int) -> None:
        seats, device = self._seats.device, self.tokens.device
        at, who = [one.row for one in masked], [one.seat for one in masked]
        logits = keep_allowed(self._workspace.logits, at, [one.mask for one in masked])
        lengths = self._seats.host_lengths[who]
        row_of, seat_of, positions = to_device(np.array([at, who, lengths], dtype=np.int64), device)
        live = torch.full((1,), len(masked), dtype=torch.int32, device=device)
        tokens = torch.empty(len(masked), dtype=torch.int32, device=device)
        # tensors of their own: a kernel is compiled for how its arguments are aligned
        sample(logits, seat_of.int(), live, seats, positions.int(), tokens, self._scratch, sms)
        self.tokens.index_copy_(0, row_of, tokens)
        seats.last_token.index_copy_(0, seat_of, tokens)

    def warm_masks(self, sms: int) -> None:
        """Compile and load what rows with masks need, on the padding seat."""
        every = b"\xff" * 4 * -(-self._workspace.logits.shape[1] // 32)
        self.redraw_masked([MaskedRow(0, self._seats.max_seqs, every)], sms)


_AT_ONCE = 32
"""Rows whose logits are copied at once: about 20 MB."""


def to_host(told: LogprobTensors) -> LogprobTensors:
    """Copies on the host, filled in when the current stream gets there."""
    return LogprobTensors(_to_host(told.ints), _to_host(told.floats))


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)
