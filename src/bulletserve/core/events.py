"""What the loop hears and what it says.

Knows nothing about sockets or devices. Heard: `Arrived`, `Aborted`, `Stop` from outside, `StepDone` from the
executor, `Masked` from the guide. Said: one `Output` a turn, with arrays of ids and never a message per token.
"""

from dataclasses import dataclass

from bulletserve.core.correction import NO_CORRECTION, NO_ERRORS, Correction
from bulletserve.core.request import Finished, Request
from bulletserve.core.token_rules import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Arrived:
    """A new request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Aborted:
    """Nobody waits for this request any more. Unknown ids are ignored: it may just have ended."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop now; open requests end with `abort`."""


@dataclass(frozen=True, slots=True)
class CacheReset:
    """Forget every cached prefix."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step has run, or failed with `error`. `fatal`: the device can do no further work.

    `tokens` in the order of the launch: parts that sample, then rows; `NO_TOKEN` for whom none was possible. Times in
    seconds of the loop's clock. `logprobs`: of those that want it, the place in `tokens` and what is told.
    `prompt_logprobs`: of those that want it, the number of the launch's part, the place in the prompt of the first
    token told, and what is told.
    """

    step_id: int
    tokens: tuple[int, ...]
    started_s: float
    finished_s: float
    error: str = ""
    fatal: bool = False
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    prompt_logprobs: tuple[tuple[int, int, tuple[TokenLogprobs, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Masked:
    """What the next token of a request with a grammar may be: bit t of `mask` stands for token t.

    `mask`: little-endian 32-bit words. `over`: the grammar is complete, no token may follow. `error`: why it cannot be
    followed, or not any further, for whoever wrote it; `ours`: the fault is not theirs; `retry_after_s`: nor ours, and
    when it may be different.
    """

    request_id: int
    mask: bytes = b""
    over: bool = False
    error: str = ""
    ours: bool = False
    retry_after_s: float | None = None


Event = Arrived | Aborted | Stop | CacheReset | StepDone | Masked


@dataclass(frozen=True, slots=True)
class Output:
    """What one turn has to tell the requests' owners.

    `tokens[i]` is the next token of `request_ids[i]`, which may appear more than once.
    `first_tokens` pairs requests whose first token is among them with the prompt tokens found in the cache,
    `admitted_s` has the times of their first admission, on the loop's clock.
    `logprobs` tells, request by request in the order of their tokens, about the tokens of those that asked;
    `prompt_logprobs` about tokens of prompts, from a place on; of what is told twice the later counts.
    """

    now_s: float
    request_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    first_tokens: tuple[tuple[int, int], ...]
    finished: tuple[Finished, ...]
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    prompt_logprobs: tuple[tuple[int, int, tuple[TokenLogprobs, ...]], ...] = ()
    admitted_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """How the engine is doing, told at least once a second.

    `oldest_step_s`: age of the oldest step that has not finished, 0 when idle. `queue_s`: forecast of the time that the
    prompts in the queue take, without their answers; 0 where nothing forecasts.
    `standing_s`: for how long nothing has been started though requests are open and nothing runs; 0 where it is not so.
    `switches`: steps on other SMs than the step before on their lane; `prefill_busy_s`, `decode_busy_s`: time in which
    a step ran on the lane (a mixed step counts for prefill).
    `correction`: by kind of step, what forecasts are multiplied with; `forecast_errors`: the mean of late of
    |observed / corrected forecast - 1|.
    Counters are totals since the start.
    """

    now_s: float
    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    oldest_step_s: float
    prefill_sms: int
    decode_sms: int
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    turns: int
    both_lanes_s: float
    longest_gap_s: float
    queue_s: float = 0.0
    correction: Correction = NO_CORRECTION
    forecast_errors: Correction = NO_ERRORS
    standing_s: float = 0.0
    switches: int = 0
    prefill_busy_s: float = 0.0
    decode_busy_s: float = 0.0
