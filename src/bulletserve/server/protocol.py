"""The bodies of the two endpoints, as far as they are served: fields, types, and what is refused.

Knows nothing about tokens. Types are strict ("12" is no number). A field that we know and do not serve yet is fine
where its value asks for nothing and an error naming it where it asks for something: never silently ignored. A field
that nobody knows is ignored, with one line in the log.
"""

import logging
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bulletserve.core.errors import InvalidRequest
from bulletserve.core.request import SamplingParams
from bulletserve.formats.description import GenerationDefaults
from bulletserve.server.sampling_fields import ChatSampling, CompletionSampling, SamplingFields
from bulletserve.server.slo_fields import SloBody

Json: TypeAlias = Any

LONGEST_STOP_CHARACTERS = 1000
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_COMPLETION_MAX_TOKENS = 16
_MOST_EXTRA_FIELDS = 100
_REMEMBERED_FIELDS = 1000

_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"}
    | {"reasoning_effort"}
)

_NOT_SERVED: Mapping[str, tuple[Json, ...]] = {
    "audio": (),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""Known fields that are not served yet, with the values (besides null) that ask for nothing."""

_seen_unknown: set[str] = set()
_log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonBody(SamplingFields):
    """What both endpoints take. null means absent everywhere."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=16)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=1024)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    slo: SloBody | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    truncate_prompt_tokens: int | None = None
    response_format: Json = None
    structured_outputs: Json = None
    guided_json: Json = None
    guided_regex: str | None = None
    guided_choice: Json = None
    guided_grammar: str | None = None

    @property
    def wanted_tokens(self) -> tuple[str, int | None]:
        """The limit on the answer's length, and the name of the field that sets it."""
        return "max_tokens", self.max_tokens


class CompletionBody(CommonBody, CompletionSampling):
    """`POST /v1/completions`. `prompt` is checked in `inputs`."""

    prompt: Json = None


class ChatFields(CommonBody):
    """What says how messages become a prompt. `messages` are checked in `inputs`, tools in `tools`.

    continue_final_message: the answer goes on with the last message, which is left open; no generation prompt then.
    """

    messages: Json = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    tools: Json = None
    tool_choice: Json = None
    parallel_tool_calls: bool | None = None

    @property
    def wanted_tokens(self) -> tuple[str, int | None]:
        """The newer name wins."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class ChatBody(ChatFields, ChatSampling):
    """`POST /v1/chat/completions`."""


def parse_body(kind: type[Body], data: bytes) -> Body:
    """The body in `data`. Raises `InvalidRequest` naming the first thing that is wrong with it."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as failure:
        errors = failure.errors(include_url=False, include_context=False, include_input=False)
        error = next(
            (one for one in errors if one["type"] == "too_long" and one["loc"][:1] == errors[0]["loc"][:1]), errors[0]
        )
        if error["type"] == "json_invalid":
            raise InvalidRequest(f"the body is not valid JSON: {error['msg']}") from None
        if not error["loc"]:
            raise InvalidRequest("the body must be a JSON object") from None
        field = str(error["loc"][0])
        where = ".".join(str(part) for part in error["loc"]) if field == "slo" else field
        raise InvalidRequest(f"{where}: {error['msg'].lower()}", param=field) from None
    extra = body.model_extra or {}
    if len(extra) > _MOST_EXTRA_FIELDS:
        raise InvalidRequest(f"the body has more than {_MOST_EXTRA_FIELDS} fields that are not supported")
    for name, value in extra.items():
        _check_extra(name, value)
    if isinstance(body, CommonBody):
        _check_common(body)
    return body


def _check_common(body: CommonBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only for stream=true", param="stream_options")
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= 256:
        raise InvalidRequest("cache_salt must have 1 to 256 characters", param="cache_salt")
    if body.request_id is not None and not REQUEST_ID.fullmatch(body.request_id):
        raise InvalidRequest("request_id must be 1 to 128 visible ASCII characters", param="request_id")
    if body.truncate_prompt_tokens is not None and not (
        body.truncate_prompt_tokens == -1 or 0 < body.truncate_prompt_tokens < 2**31
    ):
        raise InvalidRequest(
            "truncate_prompt_tokens must be a number of tokens, or -1 for as many as fit",
            param="truncate_prompt_tokens",
        )


def _check_extra(name: str, value: Json) -> None:
    if name in _NOT_SERVED:
        if value is not None and not any(_same(value, nothing) for nothing in _NOT_SERVED[name]):
            raise InvalidRequest(f"{name} is not supported by this server", param=name)
    elif name not in _IGNORED and name not in _seen_unknown and len(_seen_unknown) < _REMEMBERED_FIELDS:
        _seen_unknown.add(name)
        _log.warning("ignoring the unknown request field %.100r", name)


def _same(value: Json, nothing: Json) -> bool:
    return bool(value == nothing) and isinstance(value, bool) == isinstance(nothing, bool)


def sampling_params(body: CommonBody, defaults: GenerationDefaults) -> SamplingParams:
    """The sampling that a request asks for, the checkpoint's defaults where it does not say.

    `max_tokens` stays None where the answer may take all the room. Raises `InvalidRequest`.
    """
    name, max_tokens = body.wanted_tokens
    if max_tokens == 0 and isinstance(body, CompletionBody) and body.echo:
        max_tokens = 1  # the engine makes one at least; it is not told
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"{name} must be at least 1", param=name)
    if max_tokens is None and isinstance(body, CompletionBody):
        max_tokens = _COMPLETION_MAX_TOKENS
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if any(len(text) > LONGEST_STOP_CHARACTERS for text in stop):
        raise InvalidRequest(f"a stop string may have {LONGEST_STOP_CHARACTERS} characters", param="stop")
    if body.priority is not None and not -(2**31) <= body.priority < 2**31:
        raise InvalidRequest("priority must be a whole number of 32 bits", param="priority")
    return SamplingParams(
        temperature=_first(body.temperature, defaults.temperature, 1.0),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        top_k=_first(body.top_k, defaults.top_k, 0),
        seed=body.seed,
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        **_told_prompt(body, body.sampling_options()),
    )


def _told_prompt(body: CommonBody, options: dict[str, Json]) -> dict[str, Json]:
    """`options`, where what is told of a prompt is what an echo needs, too."""
    if options.get("prompt_logprobs") is not None and body.stream:
        raise InvalidRequest("prompt_logprobs are not told in a stream", param="prompt_logprobs")
    if isinstance(body, CompletionBody) and body.echo and options["logprobs"] is not None:
        options["prompt_logprobs"] = max(options["logprobs"], options.get("prompt_logprobs", 0))
    return options


Number = TypeVar("Number", int, float)


def _first(wanted: Number | None, default: Number | None, otherwise: Number) -> Number:
    if wanted is not None:
        return wanted
    return otherwise if default is None else default
