"""`LLM`: a model in this process, without a server, through the same loop, policies and lanes.

Knows nothing about HTTP. The scheduler's loop runs on a thread of its own; `generate` may be called from any thread,
one call at a time.
"""

import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from bulletserve.compose import Engine, build_engine
from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError, EngineError, InvalidRequest
from bulletserve.core.events import Aborted, Arrived
from bulletserve.core.prefix import block_hashes
from bulletserve.core.request import Finished, FinishReason, Request, SamplingParams
from bulletserve.core.resolve import ModelLimits, resolve_request
from bulletserve.core.token_rules import TokenLogprobs
from bulletserve.core.whole_text import check_text
from bulletserve.loop_thread import LoopThread
from bulletserve.server.detokenizer import Detokenizer
from bulletserve.server.structured import wanted_grammar
from bulletserve.server.text_codec import TextCodec

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """One prompt's answer. `finish_reason`: "stop" or "length"; `stop_reason`: the stop string or id, if one did it.

    An answer that could not be brought to its end has `finish_reason` "error", the text and tokens that there were, and
    in `error` what would be raised if it were alone: `InvalidRequest` where its own parameters are at fault (a grammar
    too large to be followed any further, rules that leave no token), `EngineError` where a step with it failed. The
    other prompts' answers are as if it had not been there.
    logprobs: of each of `token_ids`, prompt_logprobs: of each prompt token but the first, where they were asked for.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str = ""
    finish_reason: str = ""
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    error: InvalidRequest | EngineError | None = None


@dataclass(slots=True)
class _Open:
    completion: Completion
    detokenizer: Detokenizer | None
    params: SamplingParams


class LLM:
    """A model ready to complete prompts. Options are those of `EngineConfig`, named as the flags of `bullet serve`,
    or a whole `config`; `chat_template` is Jinja2 source that replaces the checkpoint's own.

    Raises `ConfigError` or `ModelError` with the fix in the message. Close it, or use it as a context manager; what is
    left open ends with the interpreter, or when nobody can reach it any more. In a forked child, which has none of its
    threads, every method raises `EngineError`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> None:
        if config is not None and (model is not None or options):
            raise ConfigError("give either a config or options, not both")
        unknown = options.keys() - EngineConfig.__dataclass_fields__.keys()
        if unknown:
            raise ConfigError(f"unknown options: {', '.join(sorted(unknown))}")
        self._process_id = os.getpid()
        self._engine: Engine = build_engine(config or EngineConfig(model=model, **options))
        self._loop = LoopThread(self._engine, self)
        checkpoint = self._engine.checkpoint
        bare = checkpoint.tokenizer is None and checkpoint.weights is not None
        self._codec = None if bare else TextCodec.from_checkpoint(checkpoint, chat_template)
        vocab_size = checkpoint.shape.vocab_size
        if self._codec is not None:
            vocab_size = min(vocab_size, self._codec.vocab_size)
        self._limits = ModelLimits(self._engine.info.max_model_len, vocab_size, frozenset(checkpoint.eos_token_ids))
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete prompts, each a text or a list of token ids, all at once. Answers in the order of the prompts.

        Raises `InvalidRequest` or `ContextTooLong` before anything runs, `EngineError` if the engine ends. What goes
        wrong with one prompt later is that answer's alone: look at `Completion.error`.
        """
        self._check_process()
        listed = _as_list(prompts)
        if not isinstance(params, SamplingParams | Sequence | None) or any(
            not isinstance(one, SamplingParams) for one in (params if isinstance(params, Sequence) else ())
        ):
            raise InvalidRequest("sampling parameters must be SamplingParams", param="params")
        each = [params or SamplingParams()] * len(listed) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(listed):
            raise ConfigError(f"{len(listed)} prompts, but {len(each)} sampling parameters")
        return self._complete([self._encode(prompt) for prompt in listed], each)

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer one conversation or several, through the model's chat template, all at once.

        A conversation is a list of messages with "role" and "content". Raises like `generate`.
        """
        self._check_process()
        if not isinstance(conversations, list | tuple):
            raise InvalidRequest("a conversation must be a list of messages", param="messages")
        several = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        return self.generate([self._text().encode_chat(messages) for messages in several], params)

    def close(self) -> None:
        """End the loop and the lanes. May be called again."""
        self._check_process()
        self._loop.close()

    def __enter__(self) -> "LLM":
        self._check_process()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process_id == os.getpid():  # a forked child may leave the block too: it has nothing to close
            self.close()

    def _check_process(self) -> None:
        """Raise `EngineError` in a forked child, where nobody would ever answer."""
        if self._process_id != os.getpid():
            raise EngineError(
                f"this LLM belongs to process {self._process_id}, and process {os.getpid()}, forked from it, has none "
                'of its threads: make an LLM in the process that uses it, or start processes with "spawn" and let each '
                "make its own"
            )

    def _text(self) -> TextCodec:
        if self._codec is None:
            raise ConfigError(
                "this checkpoint has no tokenizer: give prompts as token ids, and no stop strings, bad words or formats"
            )
        return self._codec

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        check_text(prompt, "prompt")
        return self._text().encode(prompt)

    def _complete(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
        with self._lock:
            requests = [self._request(ids, one) for ids, one in zip(prompts, params, strict=True)]
            waiting = {request.id: self._opened(request, one) for request, one in zip(requests, params, strict=True)}
            answers = [entry.completion for entry in waiting.values()]
            for request in requests:
                self._engine.inbox.post(Arrived(request))
            try:
                while waiting:
                    self._take(waiting)
            finally:
                for request_id in waiting:
                    self._engine.inbox.post(Aborted(request_id))
            if any(isinstance(answer.error, EngineError) for answer in answers) and self._loop.has_ended():
                while True:
                    self._take(waiting)  # raises why it ended, which is not one request's failure
            return answers

    def _request(self, ids: list[int], params: SamplingParams) -> Request:
        request = resolve_request(
            next(self._ids),
            ids,
            params,
            self._limits,
            self._engine.clock.now_s(),
            slo=self._engine.config.slo,
            bad_words=self._text().bad_word_ids(params.bad_words) if params.bad_words else (),
            grammar=self._grammar(params),
        )
        if not self._engine.config.enable_prefix_caching:
            return request
        return replace(request, block_hashes=block_hashes(ids, self._engine.limits.block_size))

    def _grammar(self, params: SamplingParams) -> str:
        make = wanted_grammar(params)
        if make is None:
            return ""
        self._text()  # a grammar is one of text
        return make()

    def _opened(self, request: Request, params: SamplingParams) -> _Open:
        ids = list(request.prompt_ids)
        if params.stop:
            self._text()
        detokenizer = None
        if self._codec is not None:
            keep = params.include_stop_str_in_output
            detokenizer = self._codec.detokenizer(ids, stop=params.stop, keep_stop=keep, min_tokens=params.min_tokens)
        return _Open(Completion(ids, []), detokenizer, params)

    def _take(self, waiting: dict[int, _Open]) -> None:
        """Take in one output; answers that ended leave `waiting`."""
        output = self._loop.outputs.get()
        if isinstance(output, EngineError):
            self._loop.outputs.put(output)  # for the next call
            raise output
        stopped_by = {f.request_id: f.stop_id for f in output.finished if f.stop_id is not None}
        for request_id, cached_tokens in output.first_tokens:
            if request_id in waiting:
                waiting[request_id].completion.cached_tokens = cached_tokens
        for request_id, one in output.logprobs:
            if request_id in waiting:
                waiting[request_id].completion.logprobs.append(one)
        for request_id, first, several in output.prompt_logprobs:
            if request_id in waiting:
                waiting[request_id].completion.prompt_logprobs.update(enumerate(several, first))
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            entry = waiting.get(request_id)
            if entry is None:
                continue
            entry.completion.token_ids.append(token)
            shown = entry.params.include_stop_str_in_output or stopped_by.get(request_id) != token
            if entry.detokenizer is None or not shown:
                continue
            entry.completion.text += entry.detokenizer.push(token)
            if entry.detokenizer.matched is not None:
                entry.completion.finish_reason = "stop"
                entry.completion.stop_reason = entry.detokenizer.matched
                self._engine.inbox.post(Aborted(request_id))
                del waiting[request_id]
        for finished in output.finished:
            if finished.request_id in waiting:
                _finish(waiting.pop(finished.request_id), finished)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several. Token ids are checked one by one later."""
    several: list[Any] = [prompts]
    if isinstance(prompts, list | tuple) and not (prompts and type(prompts[0]) is int):
        several = list(prompts)
    if not all(isinstance(prompt, str | list | tuple) for prompt in several):
        raise InvalidRequest("a prompt must be a text or a list of token ids", param="prompt")
    return several


def _finish(entry: _Open, finished: Finished) -> None:
    if finished.reason is FinishReason.ABORT:
        raise EngineError(finished.message or "the engine was stopped")
    completion = entry.completion
    completion.finish_reason = finished.reason.value
    if finished.reason not in (FinishReason.STOP, FinishReason.LENGTH):
        own_fault = finished.reason is FinishReason.REFUSED
        completion.finish_reason = "error"
        completion.error = (InvalidRequest if own_fault else EngineError)(finished.message)
    if finished.stop_id in entry.params.stop_token_ids:
        completion.stop_reason = finished.stop_id
    if entry.detokenizer is not None:
        completion.text += entry.detokenizer.finish()
        if entry.detokenizer.matched is not None:
            completion.finish_reason, completion.stop_reason = "stop", entry.detokenizer.matched
