"""From a checked body to prompts ready for the engine: text becomes ids, limits are enforced, defaults resolved.

Knows nothing about sockets, nor how text is tokenised.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from bulletserve.core.request import SamplingParams
from bulletserve.core.resolve import ModelLimits, resolve_request
from bulletserve.core.slo import Slo
from bulletserve.formats.description import GenerationDefaults
from bulletserve.server.calls import Prompt
from bulletserve.server.inputs import prompt_list
from bulletserve.server.open_requests import OpenRequests
from bulletserve.server.prompt_ids import PromptIds, shorten
from bulletserve.server.protocol import ChatBody, CommonBody, CompletionBody, sampling_params
from bulletserve.server.slo_fields import request_slo
from bulletserve.server.text_codec import TextCodec

_log = logging.getLogger(__name__)


class PromptMaker:
    """Makes prompts for one model. `defaults` are the checkpoint's sampling values, `classes` the targets that
    requests may have, by name."""

    def __init__(
        self,
        codec: TextCodec,
        open_requests: OpenRequests,
        ids: PromptIds,
        *,
        defaults: GenerationDefaults,
        classes: Mapping[str, Slo],
    ) -> None:
        self._codec = codec
        self._ids = ids
        self._open_requests = open_requests
        self._defaults = defaults
        self._classes = classes
        for name, value, neutral in (
            ("min_p", defaults.min_p, 0.0),
            ("repetition_penalty", defaults.repetition_penalty, 1.0),
        ):
            if value not in (None, neutral):
                _log.warning("the checkpoint's default %s=%g is not applied: it is not supported yet", name, value)

    async def completion(self, body: CompletionBody) -> list[Prompt]:
        """The prompts of a completion. Raises `RequestError`; then none of them may run."""
        params = sampling_params(body, self._defaults)
        prompts = prompt_list(body.prompt)
        self._open_requests.check_room(len(prompts) + self._ids.at_work)
        arrival_s = time.monotonic()
        several = await self._ids.of_prompts(
            prompts, add_special_tokens=body.add_special_tokens is not False, limit=self._limit(body)
        )
        return [self._prompt(ids, body, params, "prompt", arrival_s) for ids in several]

    async def chat(self, body: ChatBody) -> list[Prompt]:
        """The prompt of a chat. Raises `RequestError`."""
        params = sampling_params(body, self._defaults)
        self._open_requests.check_room(1 + self._ids.at_work)
        arrival_s = time.monotonic()
        ids = await self._ids.of_chat(body, limit=self._limit(body))
        return [self._prompt(ids, body, params, "messages", arrival_s)]

    def _limit(self, body: CommonBody) -> int | None:
        return None if body.truncate_prompt_tokens is not None else self._limits.max_model_len

    @property
    def _limits(self) -> ModelLimits:
        info = self._open_requests.info
        return ModelLimits(info.max_model_len, min(self._codec.vocab_size, info.vocab_size), self._codec.eos_ids)

    def _prompt(self, ids: list[int], body: CommonBody, params: SamplingParams, param: str, arrival_s: float) -> Prompt:
        limits = self._limits
        _, asked = body.wanted_tokens
        ids = shorten(ids, body.truncate_prompt_tokens, room=max(1, limits.max_model_len - (asked or 1)))
        room = limits.max_model_len - len(ids)
        if asked is None and params.max_tokens is not None and room > 0:
            params = replace(params, max_tokens=min(params.max_tokens, room))  # a default gives way
        request = resolve_request(
            self._open_requests.new_id(),
            ids,
            params,
            limits,
            arrival_s,
            param=param,
            slo=request_slo(body.slo, self._classes),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
        detokenizer = self._codec.detokenizer(
            ids, stop=params.stop, skip_special_tokens=body.skip_special_tokens is not False
        )
        return Prompt(request, detokenizer, frozenset(params.stop_token_ids))
