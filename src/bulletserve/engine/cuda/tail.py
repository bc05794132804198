"""The end of a step: final norm, head, the choice of tokens, and what that leaves in the seats' tables.

Knows nothing about layers. The tokens of chosen rows are drawn on the device and stay there for the next step; a copy
goes to the host.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bulletserve.engine.cuda.seat_tables import CudaSeats
from bulletserve.engine.masked import MaskedRow
from bulletserve.kernels.cuda.sampling import sample
from bulletserve.kernels.cuda.step_tables import finish
from bulletserve.kernels.masks import keep_allowed, to_device
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
        places = to_device(np.array([at, who, lengths], dtype=np.int32), device)
        live = torch.full((1,), len(masked), dtype=torch.int32, device=device)
        tokens = torch.empty(len(masked), dtype=torch.int32, device=device)
        sample(logits, places[1], live, seats, places[2], tokens, self._scratch, sms)
        self.tokens.index_copy_(0, places[0].long(), tokens)
        seats.last_token.index_copy_(0, places[1].long(), tokens)

    def warm_masks(self, sms: int) -> None:
        """Compile and load what rows with masks need, on the padding seat."""
        every = b"\xff" * 4 * -(-self._workspace.logits.shape[1] // 32)
        self.redraw_masked([MaskedRow(0, self._seats.max_seqs, every)], sms)


_AT_ONCE = 16
"""Rows whose logits are copied at once: about 10 MB."""
