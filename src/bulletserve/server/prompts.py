"""From a checked body to prompts ready for the engine: text becomes ids, limits are enforced, defaults resolved.

Knows nothing about sockets. Tokenising a long text takes milliseconds to seconds, so it goes to a few worker threads,
where the tokenizers library works without the GIL; a short one costs less than the trip there.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from bulletserve.core.request import SamplingParams
from bulletserve.core.resolve import ModelLimits, context_too_long, resolve_request
from bulletserve.core.slo import Slo
from bulletserve.formats.description import GenerationDefaults
from bulletserve.server.answer_extras import AnswerExtras, Echo, echo_of
from bulletserve.server.calls import Prompt
from bulletserve.server.inputs import message_list, prompt_list
from bulletserve.server.open_requests import OpenRequests
from bulletserve.server.protocol import ChatBody, CommonBody, CompletionBody, sampling_params
from bulletserve.server.slo_fields import request_slo
from bulletserve.server.text_codec import TextCodec
from bulletserve.server.token_log import TokenLog, TokenNames

_INLINE_CHARACTERS = 4000
"""Texts up to this are tokenised on the event loop: about 1 ms."""

_WORKERS = 2

Result = TypeVar("Result")


class PromptMaker:
    """Makes prompts for one model. `defaults` are the checkpoint's sampling values, `classes` the targets that
    requests may have, by name."""

    def __init__(
        self, codec: TextCodec, open_requests: OpenRequests, *, defaults: GenerationDefaults, classes: Mapping[str, Slo]
    ) -> None:
        self._codec = codec
        self._open_requests = open_requests
        self._defaults = defaults
        self._classes = classes
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="tokenize")
        self._at_work = 0

    def close(self) -> None:
        """End the worker threads."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def completion(self, body: CompletionBody) -> list[Prompt]:
        """The prompts of a completion. Raises `RequestError`; then none of them may run."""
        params = sampling_params(body, self._defaults)
        prompts, copies = prompt_list(body.prompt), range(body.choices)
        self._open_requests.check_room(len(prompts) * len(copies) + self._at_work)
        add_special_tokens = body.add_special_tokens is not False

        def encode_all() -> list[list[int]]:
            return [self._encode(one, "prompt", add_special_tokens) if isinstance(one, str) else one for one in prompts]

        characters = sum(len(one) for one in prompts if isinstance(one, str))
        arrival_s = time.monotonic()
        encoded = await self._run(encode_all, characters)
        echoes: list[Echo | None] = [None] * len(encoded)
        if body.echo:
            echoes = await self._run(partial(self._echoes, prompts, encoded, body), sum(map(len, encoded)))
        return [
            self._prompt(ids, body, params, "prompt", arrival_s, copy, echo)
            for ids, echo in zip(encoded, echoes, strict=True)
            for copy in copies
        ]

    def _echoes(
        self, sent: Sequence[str | list[int]], encoded: Sequence[Sequence[int]], body: CommonBody
    ) -> list[Echo | None]:
        skips = body.skip_special_tokens is not False
        return [
            echo_of(ids, self._codec.detokenizer((), skip_special_tokens=skips), one if isinstance(one, str) else None)
            for one, ids in zip(sent, encoded, strict=True)
        ]

    async def chat(self, body: ChatBody) -> list[Prompt]:
        """The prompt of a chat. Raises `RequestError`."""
        params = sampling_params(body, self._defaults)
        messages = message_list(body.messages)
        copies = range(body.choices)
        self._open_requests.check_room(len(copies) + self._at_work)

        def encode() -> list[int]:
            text = self._codec.render_chat(
                messages,
                add_generation_prompt=body.add_generation_prompt is not False,
                variables=body.chat_template_kwargs,
            )
            # the template writes its own special tokens
            return self._encode(text, "messages", add_special_tokens=body.add_special_tokens is True)

        arrival_s = time.monotonic()
        ids = await self._run(encode, sum(len(message["content"]) for message in messages))
        return [self._prompt(ids, body, params, "messages", arrival_s, copy) for copy in copies]

    async def _run(self, work: Callable[[], Result], characters: int) -> Result:
        if characters <= _INLINE_CHARACTERS:
            return work()
        self._at_work += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workers, work)
        finally:
            self._at_work -= 1

    @property
    def _limits(self) -> ModelLimits:
        info = self._open_requests.info
        return ModelLimits(info.max_model_len, min(self._codec.vocab_size, info.vocab_size), self._codec.eos_ids)

    def _encode(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        longest, max_model_len = self._codec.tokenizer.longest_token, self._limits.max_model_len
        if longest is not None and len(text) > max_model_len * longest:
            # hopeless: say so without tokenising megabytes
            raise context_too_long(max_model_len, f"at least {len(text) // longest}", param=param)
        return self._codec.encode(text, add_special_tokens=add_special_tokens)

    def _prompt(
        self,
        ids: Sequence[int],
        body: CommonBody,
        params: SamplingParams,
        param: str,
        arrival_s: float,
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
        )
        detokenizer = self._codec.detokenizer(
            ids,
            stop=params.stop,
            keep_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=body.skip_special_tokens is not False,
        )
        extras = answer_extras(self._codec, ids, body, params, echo)
        return Prompt(request, detokenizer, frozenset(params.stop_token_ids), extras, copy)


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
