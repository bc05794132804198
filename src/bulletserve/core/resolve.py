"""From what a client asked to a `Request` the engine can run: every default resolved, every limit enforced.

Knows nothing about text or HTTP. The server and the offline `LLM` share it, so both refuse the same things with the
same words.
"""

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bulletserve.core.errors import ContextTooLong, InvalidRequest
from bulletserve.core.request import Request, SamplingParams
from bulletserve.core.slo import Slo
from bulletserve.core.token_rules import NO_RULES, TokenRules

_IDS_AT_ONCE = 4096
"""Checked in about 0.15 ms."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What holds for every request to one model. Token ids lie below `vocab_size`."""

    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise `InvalidRequest` naming the first of `ids`, be they numbers or not, that is no token of the model.

    At the speed of C, since a prompt may have a hundred thousand, but in pieces: a thread gives way to others only
    between two calls into C.
    """
    for start in range(0, len(ids), _IDS_AT_ONCE):
        piece = ids[start : start + _IDS_AT_ONCE]
        if set(map(type, piece)) == {int} and min(piece) >= 0 and max(piece) < vocab_size:
            continue
        for token in piece:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"{param}: {token!r:.40} is no token id of this model (0 to {vocab_size - 1})", param=param
                )


def context_too_long(
    max_model_len: int, prompt_tokens: str, max_tokens: int | None = None, *, param: str
) -> ContextTooLong:
    """The error for a prompt, or prompt and wanted output, that exceed the context; both numbers in its message."""
    wanted = "and no room is left for an answer" if max_tokens is None else f"and {max_tokens} more were asked for"
    return ContextTooLong(
        f"this model's maximum context length is {max_model_len} tokens, but the prompt has "
        f"{prompt_tokens} tokens {wanted}",
        param=param,
    )


def resolve_request(
    request_id: int,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    limits: ModelLimits,
    arrival_s: float,
    *,
    param: str = "prompt",
    slo: Slo | None = None,
    priority: int = 0,
    cache_salt: str = "",
    bad_words: Sequence[tuple[int, ...]] = (),
    grammar: str = "",
) -> Request:
    """One request, checked. `param` names the prompt's field in errors, `bad_words` are those of `params` as ids.

    Raises `InvalidRequest` for an empty prompt or an id outside the vocabulary, `ContextTooLong`.
    """
    if not prompt_ids:
        raise InvalidRequest(f"{param} must not be empty: it has no tokens", param=param)
    check_ids(prompt_ids, limits.vocab_size, param)
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logit_bias", tuple(params.logit_bias)),
    ):
        check_ids(ids, limits.vocab_size, name)
    room = limits.max_model_len - len(prompt_ids)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if room < 1:
        raise context_too_long(limits.max_model_len, str(len(prompt_ids)), param=param)
    if max_tokens > room:
        raise context_too_long(limits.max_model_len, str(len(prompt_ids)), max_tokens, param=param)
    if params.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {params.min_tokens}, but {max_tokens} may be made", param="min_tokens")
    stop_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= limits.eos_ids
    return Request(
        id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        arrival_s=arrival_s,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        stop_ids=stop_ids,
        slo=slo or Slo(),
        priority=priority,
        cache_salt=cache_salt,
        rules=_rules(params, stop_ids, tuple(bad_words)),
        grammar=grammar,
    )


def _rules(
    params: SamplingParams, stop_ids: Collection[int], bad_words: tuple[tuple[int, ...], ...]
) -> TokenRules | None:
    """The rules of a request; None where they would change and tell nothing. Raises `InvalidRequest`."""
    least = params.min_tokens if stop_ids else 0
    rules = TokenRules(
        allowed_ids=tuple(dict.fromkeys(params.allowed_token_ids)),
        bad_words=bad_words,
        min_tokens=least,
        end_ids=tuple(sorted(stop_ids)) if least else (),
        bias=tuple((token, float(value)) for token, value in params.logit_bias.items() if value),
        repetition_penalty=float(params.repetition_penalty),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        min_p=float(params.min_p),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )
    never = {word[0] for word in bad_words if len(word) == 1}.union(rules.end_ids)
    if rules.allowed_ids and never.issuperset(rules.allowed_ids):
        raise InvalidRequest(
            "allowed_token_ids: bad_words and min_tokens forbid every one of them", param="allowed_token_ids"
        )
    return None if rules == NO_RULES else rules
