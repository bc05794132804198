"""`POST /tokenize` and `POST /detokenize`: prompt ids as requests get them, and text back.

Knows nothing about the engine: what turns a body into ids is the same object that serves requests.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from bulletserve.core.errors import InvalidRequest
from bulletserve.core.resolve import check_ids
from bulletserve.server.open_requests import OpenRequests
from bulletserve.server.prompt_ids import PromptIds
from bulletserve.server.prompts import PromptMaker
from bulletserve.server.protocol import ChatFields, Json, parse_body
from bulletserve.server.request_body import Bodies
from bulletserve.server.settings import ServerSettings, served_name
from bulletserve.server.text_codec import TextCodec

_DECODED_CHARACTERS = 10
"""A token becomes text in the time in which so many characters are tokenised."""


class TokenizeBody(ChatFields):
    """A body of either endpoint: `prompt`, a string, or `messages`. `return_token_strs`: also each token as text.

    No prompt depends on what is of another type there.
    """

    prompt: Json = None
    return_token_strs: bool | None = None
    echo: Json = None
    logprobs: Json = None
    top_logprobs: Json = None


class DetokenizeBody(BaseModel):
    """`tokens`, ids. `skip_special_tokens`: without the control tokens among them."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
    skip_special_tokens: bool | None = None


class TextEndpoints:
    """One method per path."""

    def __init__(
        self,
        ids: PromptIds,
        prompts: PromptMaker,
        codec: TextCodec,
        open_requests: OpenRequests,
        bodies: Bodies,
        settings: ServerSettings,
    ) -> None:
        self._ids = ids
        self._prompts = prompts
        self._codec = codec
        self._open_requests = open_requests
        self._bodies = bodies
        self._settings = settings

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the ids of a text or a chat, however long."""
        body = parse_body(TokenizeBody, await self._bodies.read(request))
        served_name(body.model, self._settings.served_names)
        self._open_requests.check_room(1, at_work=self._ids.at_work)
        tokens = await self._tokens(body)
        work = len(tokens) * (_DECODED_CHARACTERS if body.return_token_strs else 1)
        return await self._ids.run(partial(self._tokenized, tokens, told=bool(body.return_token_strs)), work)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of ids, special tokens included unless the body says otherwise."""
        body = parse_body(DetokenizeBody, await self._bodies.read(request))
        served_name(body.model, self._settings.served_names)
        self._open_requests.check_room(1, at_work=self._ids.at_work)
        skips = body.skip_special_tokens is True
        return await self._ids.run(partial(self._detokenized, body.tokens, skips=skips), len(body.tokens))

    def _tokenized(self, tokens: Sequence[int], *, told: bool) -> Response:
        texts = [self._codec.decode([token], skip_special_tokens=False) for token in tokens] if told else None
        max_model_len = self._open_requests.info.max_model_len
        return _json({"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": texts})

    def _detokenized(self, tokens: list[int], *, skips: bool) -> Response:
        check_ids(tokens, self._codec.vocab_size, "tokens")
        return _json({"prompt": self._codec.decode(tokens, skip_special_tokens=skips)})

    async def _tokens(self, body: TokenizeBody) -> Sequence[int]:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if body.messages is None and not isinstance(body.prompt, str):
            raise InvalidRequest("prompt must be a string", param="prompt")
        return await self._prompts.ids(body, body.prompt)


def _json(content: dict[str, Json]) -> Response:
    """An answer that may hold a million ids, which the usual encoder takes ten times as long for."""
    return Response(msgspec.json.encode(content), media_type="application/json")
