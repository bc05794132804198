"""A request as the engine sees it: token ids in, token ids out.

Knows nothing about text, HTTP or devices. Text, chat templates and stop strings belong to the front; by the
time a `Request` exists every default is resolved and every field is known to be valid.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from bulletserve.core.errors import InvalidRequest
from bulletserve.core.slo import Slo

SEED_LIMIT = 2**63


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop, with vLLM's names and defaults.

    temperature: 0 is greedy. top_p in (0, 1]. top_k: 0 or -1 is off. seed: the same seed and the same prompt give the
    same tokens whatever else runs, up to near ties of rounding; None draws one. max_tokens: None means all the room
    that is left.
    stop: strings that end the answer and are not part of it. stop_token_ids: ids that end it.
    ignore_eos: do not end at the model's own end tokens.

    Raises `InvalidRequest` with the field's name for a value outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop: str | Iterable[str] = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_numbers()
        self._check_stops()

    def _check_numbers(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature <= 100:
            raise InvalidRequest("temperature must be a number from 0 to 100", param="temperature")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidRequest("top_p must be a number above 0 and at most 1", param="top_p")
        if type(self.top_k) is not int or not -1 <= self.top_k < 2**31:
            raise InvalidRequest("top_k must be a whole number, -1 or 0 for off", param="top_k")
        if self.seed is not None and (type(self.seed) is not int or not -SEED_LIMIT <= self.seed < SEED_LIMIT):
            raise InvalidRequest("seed must be a whole number of 64 bits", param="seed")
        if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 1):
            raise InvalidRequest("max_tokens must be a whole number of at least 1", param="max_tokens")

    def _check_stops(self) -> None:
        if len(self.stop) > 16 or any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidRequest("stop must be at most 16 strings, none of them empty", param="stop")
        if any(type(i) is not int or i < 0 for i in self.stop_token_ids):
            raise InvalidRequest("stop_token_ids must be token ids, 0 or larger", param="stop_token_ids")
        if type(self.ignore_eos) is not bool:
            raise InvalidRequest("ignore_eos must be true or false", param="ignore_eos")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt on its way through the engine.

    `id` is unique in the engine's life. `max_tokens`, `seed` and `stop_ids` (the model's end tokens included
    unless ignored) are resolved. `block_hashes` chain over the prompt's full blocks (`core/prefix`), salted. The engine
    keeps `prompt_ids` as it is, so nobody may change it. `grammar`: what every token of the answer must fit, as
    `bulletserve.grammar` writes it; "" for a free answer.
    """

    id: int
    prompt_ids: Sequence[int]
    max_tokens: int
    arrival_s: float
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    cache_salt: str = ""
    block_hashes: tuple[bytes, ...] = ()
    grammar: str = ""


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one request. `stop_id` is the token that stopped it; `message` says what went wrong."""

    request_id: int
    reason: FinishReason
    stop_id: int | None = None
    message: str = ""
    retry_after_s: float | None = None
