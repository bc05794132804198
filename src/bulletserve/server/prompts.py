"""From a checked body to prompts ready for the engine: text becomes ids, limits are enforced, defaults resolved.

Knows nothing about sockets, nor how text is tokenised.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from bulletserve.core.request import SamplingParams
from bulletserve.core.resolve import ModelLimits, check_ids, resolve_request
from bulletserve.core.slo import Slo
from bulletserve.formats.description import GenerationDefaults
from bulletserve.server.answer_extras import AnswerExtras, Echo, echo_of
from bulletserve.server.call_formats import CallFormat
from bulletserve.server.calls import Prompt
from bulletserve.server.inputs import prompt_count, prompt_list
from bulletserve.server.open_requests import OpenRequests
from bulletserve.server.prompt_ids import PromptIds, kept_tokens
from bulletserve.server.protocol import ChatBody, ChatFields, CommonBody, CompletionBody, sampling_params
from bulletserve.server.slo_fields import request_slo
from bulletserve.server.structured import MakeGrammar, wanted_grammar
from bulletserve.server.text_codec import TextCodec
from bulletserve.server.token_log import TokenLog, TokenNames
from bulletserve.server.tools import ToolUse, tool_use

_PROMPT_CHARACTERS = 100
"""A prompt is made in the time in which so many characters are tokenised, its ids apart."""


class PromptMaker:
    """Makes prompts for one model. `defaults` are the checkpoint's sampling values, `classes` the targets that
    requests may have, by name; `call_format` is that in which the model calls tools by itself."""

    def __init__(
        self,
        codec: TextCodec,
        open_requests: OpenRequests,
        ids: PromptIds,
        *,
        defaults: GenerationDefaults,
        classes: Mapping[str, Slo],
        call_format: CallFormat | None = None,
    ) -> None:
        self._codec = codec
        self._ids = ids
        self._open_requests = open_requests
        self._defaults = defaults
        self._classes = classes
        self._call_format = call_format

    async def completion(self, body: CompletionBody) -> list[Prompt]:
        """The prompts of a completion. Raises `RequestError`; then none of them may run."""
        params = sampling_params(body, self._defaults)
        prompts = await self._ids.run(partial(prompt_list, body.prompt), prompt_count(body.prompt))
        make_grammar = wanted_grammar(body)
        self._open_requests.check_room(len(prompts), body.choices, at_work=self._ids.at_work)
        arrival_s = time.monotonic()
        grammar = await self._grammar(make_grammar)
        several = await self._text_ids(prompts, body, limit=self._limit(body))

        def make() -> list[Prompt]:
            echoes = self._echoes(prompts, several) if body.echo else [None] * len(several)
            return [
                self._prompt(ids, body, params, "prompt", arrival_s, grammar, copy, echo)
                for ids, echo in zip(several, echoes, strict=True)
                for copy in range(body.choices)
            ]

        return await self._ids.run(make, self._work(several, body))

    async def chat(self, body: ChatBody) -> list[Prompt]:
        """The prompt of a chat. Raises `RequestError`."""
        params = sampling_params(body, self._defaults)
        tools = self._tools(body)
        self._open_requests.check_room(1, body.choices, at_work=self._ids.at_work)
        arrival_s = time.monotonic()
        grammar = await self._grammar(tools.make_grammar)
        ids = await self._chat_ids(body, tools, limit=self._limit(body))

        def make() -> list[Prompt]:
            copies = range(body.choices)
            prompts = [self._prompt(ids, body, params, "messages", arrival_s, grammar, copy) for copy in copies]
            return [replace(prompt, make_reader=tools.make_reader) for prompt in prompts]

        return await self._ids.run(make, self._work([ids], body))

    async def ids(self, body: ChatFields, text: str | None) -> tuple[int, ...]:
        """The prompt of a request with this body, of `text` or, where that is None, of its messages; however long.
        Raises `RequestError`."""
        if text is None:
            return await self._chat_ids(body, self._tools(body), limit=None)
        (ids,) = await self._text_ids([text], body, limit=None)
        return ids

    def _tools(self, body: ChatFields) -> ToolUse:
        return tool_use(body, self._call_format, wanted_grammar(body))

    async def _text_ids(
        self, prompts: Sequence[str | list[int]], body: CommonBody, *, limit: int | None
    ) -> list[tuple[int, ...]]:
        return await self._ids.of_prompts(
            prompts, add_special_tokens=body.add_special_tokens is not False, limit=limit, kept=self._kept(body)
        )

    async def _chat_ids(self, body: ChatFields, tools: ToolUse, *, limit: int | None) -> tuple[int, ...]:
        return await self._ids.of_chat(body, tools, limit=limit, kept=self._kept(body))

    async def _grammar(self, make: MakeGrammar | None) -> str:
        return "" if make is None else await self._ids.grammar(make)

    def _work(self, several: Sequence[Sequence[int]], body: CommonBody) -> int:
        """What making the prompts of these ids takes, measured in characters (`PromptIds.run`)."""
        return body.choices * (len(several) * _PROMPT_CHARACTERS + sum(map(len, several)))

    def _kept(self, body: CommonBody) -> int | None:
        _, asked = body.wanted_tokens
        return kept_tokens(body.truncate_prompt_tokens, room=max(1, self._limits.max_model_len - (asked or 1)))

    def _echoes(self, sent: Sequence[str | list[int]], encoded: Sequence[Sequence[int]]) -> list[Echo | None]:
        for ids in encoded:
            check_ids(ids, self._limits.vocab_size, "prompt")  # an echo is made before its request is
        return [
            echo_of(ids, self._codec.detokenizer((), skip_special_tokens=False), one if isinstance(one, str) else None)
            for one, ids in zip(sent, encoded, strict=True)
        ]

    def _limit(self, body: CommonBody) -> int | None:
        return None if body.truncate_prompt_tokens is not None else self._limits.max_model_len

    @property
    def _limits(self) -> ModelLimits:
        info = self._open_requests.info
        return ModelLimits(info.max_model_len, min(self._codec.vocab_size, info.vocab_size), self._codec.eos_ids)

    def _prompt(
        self,
        ids: tuple[int, ...],
        body: CommonBody,
        params: SamplingParams,
        param: str,
        arrival_s: float,
        grammar: str,
        copy: int,
        echo: Echo | None = None,
    ) -> Prompt:
        limits = self._limits
        _, asked = body.wanted_tokens
        room = limits.max_model_len - len(ids)
        if asked is None and params.max_tokens is not None and room > 0:
            params = replace(params, max_tokens=min(params.max_tokens, room))  # a default gives way
        request = resolve_request(
            self._open_requests.new_id(),
            ids,
            params.copy(copy),
            limits,
            arrival_s,
            param=param,
            slo=request_slo(body.slo, self._classes),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            bad_words=self._codec.bad_word_ids(params.bad_words),
            grammar=grammar,
        )
        detokenizer = self._codec.detokenizer(
            ids,
            stop=params.stop,
            keep_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=body.skip_special_tokens is not False,
        )
        extras = answer_extras(self._codec, ids, body, params, echo)
        return Prompt(request, detokenizer, frozenset(params.stop_token_ids), extras, copy, body.choices)


def answer_extras(
    codec: TextCodec, ids: Sequence[int], body: CommonBody, params: SamplingParams, echo: Echo | None
) -> AnswerExtras | None:
    """What the answer has beyond its text; None for nothing."""
    skips = body.skip_special_tokens is not False
    pieces = codec.tokenizer.pieces if skips else codec.tokenizer.all_pieces
    logs, tells_prompt = params.logprobs is not None, body.prompt_logprobs is not None
    if not (echo is not None or logs or tells_prompt or params.include_stop_str_in_output):
        return None
    return AnswerExtras(
        ids,
        TokenNames(codec.tokenizer.all_pieces),
        chat=isinstance(body, ChatBody),
        silent=echo is not None and body.wanted_tokens[1] == 0,
        shows_stop=params.include_stop_str_in_output,
        log=TokenLog(codec.detokenizer(ids, skip_special_tokens=skips), pieces) if logs else None,
        echo=echo,
        tells_prompt=tells_prompt,
    )
