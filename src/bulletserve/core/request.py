"""A request as the engine sees it: token ids in, token ids out.

Knows nothing about text, HTTP or devices. Text, chat templates and stop strings belong to the front; by the
time a `Request` exists every default is resolved and every field is known to be valid.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from bulletserve.core.errors import InvalidRequest
from bulletserve.core.slo import Slo
from bulletserve.core.token_rules import MOST_LOGPROBS, TokenRules
from bulletserve.core.whole_text import check_text

SEED_LIMIT = 2**63
MOST_BIASES = 1024
MOST_ALLOWED = 8192
MOST_BAD_WORDS = 128


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _listed(value: Any, param: str) -> tuple[Any, ...]:
    """Several things, one text, or None for none of them. Raises `InvalidRequest`."""
    if isinstance(value, str):
        return (value,)
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise InvalidRequest(f"{param} must be a list, not {value!r:.40}", param=param)
    return tuple(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop, with vLLM's names and defaults.

    temperature: 0 is greedy. top_p in (0, 1]. top_k: 0 or -1 is off. seed: the same seed and the same prompt give the
    same tokens whatever else runs, up to near ties of rounding; None draws one. max_tokens: None means all the room
    that is left.
    stop: strings that end the answer and are not part of it, unless include_stop_str_in_output. stop_token_ids: ids
    that end it. ignore_eos: do not end at the model's own end tokens. min_tokens: do not end before.
    logit_bias: what is added to the logits of ids, -100 to 100. allowed_token_ids: the only ids there are. bad_words:
    texts that the answer does not hold. The penalties, min_p and the logprobs: see `TokenRules`. response_format,
    structured_outputs, guided_*: the format of the answer (docs/structured.md), checked where it becomes a grammar.

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
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, _listed(getattr(self, name), name))
        biases: Any = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(biases, Mapping):
            raise InvalidRequest("logit_bias must give token ids a number each", param="logit_bias")
        object.__setattr__(self, "logit_bias", dict(biases))
        self._check_numbers()
        self._check_stops()
        self._check_penalties()
        self._check_tokens()
        self._check_logprobs()

    def copy(self, number: int) -> "SamplingParams":
        """These for one of several answers to a prompt: each has a seed of its own."""
        if self.seed is None or not number:
            return self
        return replace(self, seed=(self.seed + number + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT)

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
        for text in self.stop:
            check_text(text, "stop")
        wrong = [token for token in self.stop_token_ids if type(token) is not int or token < 0]
        if wrong:
            raise InvalidRequest(f"stop_token_ids: {wrong[0]!r} is no token id", param="stop_token_ids")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if type(getattr(self, name)) is not bool:
                raise InvalidRequest(f"{name} must be true or false", param=name)
        least, most = self.min_tokens, self.max_tokens
        if type(least) is not int or least < 0 or (most is not None and least > most):
            raise InvalidRequest("min_tokens must be a whole number from 0 to max_tokens", param="min_tokens")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or not -2 <= value <= 2:
                raise InvalidRequest(f"{name} must be a number from -2 to 2", param=name)
        if not _is_number(self.repetition_penalty) or not 0.01 <= self.repetition_penalty <= 100:
            raise InvalidRequest("repetition_penalty must be a number from 0.01 to 100", param="repetition_penalty")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise InvalidRequest("min_p must be a number from 0 to 1", param="min_p")

    def _check_tokens(self) -> None:
        biases = self.logit_bias
        if len(biases) > MOST_BIASES or any(not _is_number(v) or not -100 <= v <= 100 for v in biases.values()):
            raise InvalidRequest(
                f"logit_bias must give at most {MOST_BIASES} token ids a number from -100 to 100", param="logit_bias"
            )
        if len(self.allowed_token_ids) > MOST_ALLOWED:
            raise InvalidRequest(f"allowed_token_ids may be at most {MOST_ALLOWED} ids", param="allowed_token_ids")
        words = self.bad_words
        if len(words) > MOST_BAD_WORDS or any(not isinstance(w, str) or not 0 < len(w) <= 1000 for w in words):
            raise InvalidRequest(
                f"bad_words must be at most {MOST_BAD_WORDS} texts of 1 to 1000 characters", param="bad_words"
            )
        for word in words:
            check_text(word, "bad_words")

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value <= MOST_LOGPROBS):
                raise InvalidRequest(f"{name} must be a whole number from 0 to {MOST_LOGPROBS}", param=name)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt on its way through the engine.

    `id` is unique in the engine's life. `max_tokens`, `seed` and `stop_ids` (the model's end tokens included
    unless ignored) are resolved. `block_hashes` chain over the prompt's full blocks (`core/prefix`), salted. The engine
    keeps `prompt_ids` as it is, so nobody may change it. `rules` is None where nothing is asked.
    `grammar`: what every token of the answer must fit, as `bulletserve.grammar` writes it; "" for a free answer.
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
    rules: TokenRules | None = None
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
