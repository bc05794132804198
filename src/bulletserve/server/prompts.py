"""From a checked body to prompts ready for the engine: text becomes ids, limits are enforced, defaults resolved.

Knows nothing about sockets. Tokenising a long text takes milliseconds to seconds, so it goes to a few worker threads,
where the tokenizers library works without the GIL; a short one costs less than the trip there.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from bulletserve.core.errors import InvalidRequest
from bulletserve.core.request import SamplingParams
from bulletserve.core.resolve import ModelLimits, context_too_long, resolve_request
from bulletserve.core.slo import Slo
from bulletserve.formats.description import GenerationDefaults
from bulletserve.server.calls import Prompt
from bulletserve.server.inputs import message_list, prompt_list
from bulletserve.server.open_requests import OpenRequests
from bulletserve.server.protocol import ChatBody, CommonBody, CompletionBody, sampling_params
from bulletserve.server.slo_fields import request_slo
from bulletserve.server.structured import MakeGrammar, wanted_grammar
from bulletserve.server.text_codec import TextCodec
from bulletserve.server.tool_calls import MakeReader
from bulletserve.server.tools import tool_use

_INLINE_CHARACTERS = 4000
"""Texts up to this are tokenised on the event loop: about 1 ms."""

_WORKERS = 2

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class PromptMaker:
    """Makes prompts for one model. `defaults` are the checkpoint's sampling values, `classes` the targets that
    requests may have, by name; `call_reader` finds the tool calls that the model makes by itself."""

    def __init__(
        self,
        codec: TextCodec,
        open_requests: OpenRequests,
        *,
        defaults: GenerationDefaults,
        classes: Mapping[str, Slo],
        call_reader: MakeReader | None = None,
    ) -> None:
        self._codec = codec
        self._open_requests = open_requests
        self._defaults = defaults
        self._classes = classes
        self._call_reader = call_reader
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="tokenize")
        self._at_work = 0
        for name, value, neutral in (
            ("min_p", defaults.min_p, 0.0),
            ("repetition_penalty", defaults.repetition_penalty, 1.0),
        ):
            if value not in (None, neutral):
                _log.warning("the checkpoint's default %s=%g is not applied: it is not supported yet", name, value)

    def close(self) -> None:
        """End the worker threads."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def completion(self, body: CompletionBody) -> list[Prompt]:
        """The prompts of a completion. Raises `RequestError`; then none of them may run."""
        params = sampling_params(body, self._defaults)
        prompts = prompt_list(body.prompt)
        make_grammar = wanted_grammar(body)
        self._open_requests.check_room(len(prompts) + self._at_work)
        add_special_tokens = body.add_special_tokens is not False

        def encode_all() -> list[list[int]]:
            return [self._encode(one, "prompt", add_special_tokens) if isinstance(one, str) else one for one in prompts]

        characters = sum(len(one) for one in prompts if isinstance(one, str))
        arrival_s = time.monotonic()
        grammar = await self._grammar(make_grammar)
        encoded = await self._run(encode_all, characters)
        return [self._prompt(ids, body, params, "prompt", arrival_s, grammar) for ids in encoded]

    async def chat(self, body: ChatBody) -> list[Prompt]:
        """The prompt of a chat. Raises `RequestError`."""
        params = sampling_params(body, self._defaults)
        messages = message_list(body.messages)
        tools = tool_use(body, self._call_reader)
        make_grammar = wanted_grammar(body)
        if make_grammar is not None and tools.make_reader is not None:
            raise InvalidRequest("a format for the answer and tools exclude each other: set tool_choice to none")
        self._open_requests.check_room(1 + self._at_work)

        def encode() -> list[int]:
            text = self._codec.render_chat(
                messages,
                add_generation_prompt=body.add_generation_prompt is not False,
                variables=body.chat_template_kwargs,
                tools=tools.listed,
            )
            # the template writes its own special tokens
            return self._encode(text, "messages", add_special_tokens=body.add_special_tokens is True)

        arrival_s = time.monotonic()
        grammar = await self._grammar(make_grammar or tools.make_grammar)
        ids = await self._run(encode, sum(len(message["content"]) for message in messages))
        prompt = self._prompt(ids, body, params, "messages", arrival_s, grammar)
        return [replace(prompt, make_reader=tools.make_reader)]

    async def _grammar(self, make: MakeGrammar | None) -> str:
        """Always in a worker thread: what a grammar costs does not show in its length."""
        return "" if make is None else await self._run(make, _INLINE_CHARACTERS + 1)

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
        grammar: str,
    ) -> Prompt:
        limits = self._limits
        _, asked = body.wanted_tokens
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
            grammar=grammar,
        )
        detokenizer = self._codec.detokenizer(
            ids, stop=params.stop, skip_special_tokens=body.skip_special_tokens is not False
        )
        return Prompt(request, detokenizer, frozenset(params.stop_token_ids))
