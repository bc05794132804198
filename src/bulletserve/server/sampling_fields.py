"""The fields of a request that say how tokens are chosen and what is told of them, but for those as old as the API.

Knows nothing about prompts. Ranges are checked where `SamplingParams` are made; here is only what JSON writes
differently.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bulletserve.core.errors import InvalidRequest
from bulletserve.core.request import MOST_ALLOWED, MOST_BAD_WORDS, MOST_BIASES
from bulletserve.core.token_rules import MOST_LOGPROBS

MOST_CHOICES = 128

_AS_THEY_ARE = (
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "include_stop_str_in_output",
)


class SamplingFields(BaseModel):
    """What both endpoints take. `spaces_between_special_tokens` is vLLM's and changes nothing for the tokenizers served
    here: none of them writes any."""

    model_config = ConfigDict(strict=True)

    n: int | None = None
    best_of: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_BIASES)] | None = None
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MOST_ALLOWED)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=MOST_BAD_WORDS)] | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to tell with each token; None to tell of none."""
        return None

    @property
    def choices(self) -> int:
        """Answers to each prompt. Raises `InvalidRequest`."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MOST_CHOICES:
            raise InvalidRequest(f"n must be from 1 to {MOST_CHOICES}", param="n")
        if self.best_of not in (None, n):
            raise InvalidRequest("best_of must be equal to n: every answer that is made is told", param="best_of")
        return n

    def sampling_options(self) -> dict[str, Any]:
        """Those that ask for something, named as in `SamplingParams`. Raises `InvalidRequest`."""
        options = {name: getattr(self, name) for name in _AS_THEY_ARE if getattr(self, name) is not None}
        if self.logit_bias is not None:
            options["logit_bias"] = _by_id(self.logit_bias)
        return options | {"logprobs": self.alternatives}


class CompletionSampling(SamplingFields):
    """What completions take too. `logprobs`: false, as on chats, asks for none."""

    echo: bool | None = None
    logprobs: int | Literal[False] | None = None

    @property
    def alternatives(self) -> int | None:
        """See `SamplingFields`."""
        return None if self.logprobs is False else self.logprobs


class ChatSampling(SamplingFields):
    """What chats take too."""

    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def alternatives(self) -> int | None:
        """See `SamplingFields`. Raises `InvalidRequest` for too many, and for alternatives to nothing."""
        several = self.top_logprobs or 0
        if not 0 <= several <= MOST_LOGPROBS:
            raise InvalidRequest(f"top_logprobs must be a whole number from 0 to {MOST_LOGPROBS}", param="top_logprobs")
        if several and not self.logprobs:
            raise InvalidRequest("top_logprobs is only for logprobs=true", param="top_logprobs")
        return several if self.logprobs else None


def _by_id(biases: Mapping[str, float]) -> dict[int, float]:
    for key in biases:
        if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) < 20):
            raise InvalidRequest(f"logit_bias: {key[:40]!r} is no token id", param="logit_bias")
    return {int(key): value for key, value in biases.items()}
