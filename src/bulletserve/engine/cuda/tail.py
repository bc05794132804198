"""The end of a step: final norm, head, the choice of tokens, and what that leaves in the seats' tables.

Knows nothing about layers. The tokens of chosen rows are drawn on the device and stay there for the next step; a copy
goes to the host.
"""

import torch
from torch import Tensor

from bulletserve.engine.cuda.seat_tables import CudaSeats
from bulletserve.kernels.cuda.sampling import sample
from bulletserve.kernels.cuda.step_tables import finish
from bulletserve.models.cuda_operators import CudaStepContext, LaneWorkspace
from bulletserve.models.decoder import Decoder


class Tail:
    """Draws one lane's tokens, up to `max_rows` a step; `tokens` int32 [max_rows] holds the last step's."""

    def __init__(self, model: Decoder, seats: CudaSeats, workspace: LaneWorkspace, max_rows: int) -> None:
        self._model = model
        self._seats = seats
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
