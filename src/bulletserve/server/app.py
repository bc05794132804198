"""The HTTP application: which path does what.

Knows nothing about processes or listening sockets (`serve` does). Every answer that is no success is an error object.
"""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bulletserve.core.errors import BulletError
from bulletserve.formats.description import GenerationDefaults
from bulletserve.server import openapi
from bulletserve.server.answering import Answering
from bulletserve.server.answers import AnswerHead
from bulletserve.server.call_formats import FORMATS
from bulletserve.server.calls import Prompt
from bulletserve.server.cross_origin import CrossOrigin
from bulletserve.server.doorway import Doorway
from bulletserve.server.http_errors import HttpError, error_response, on_error, plain_error
from bulletserve.server.open_requests import OpenRequests
from bulletserve.server.prompt_ids import PromptIds
from bulletserve.server.prompts import PromptMaker
from bulletserve.server.protocol import ChatBody, CommonBody, CompletionBody, parse_body
from bulletserve.server.request_body import Bodies
from bulletserve.server.request_facts import Watcher, facts_of
from bulletserve.server.settings import ServerSettings, served_name
from bulletserve.server.slo_fields import slo_classes
from bulletserve.server.text_codec import TextCodec
from bulletserve.server.text_endpoints import DetokenizeBody, TextEndpoints, TokenizeBody
from bulletserve.telemetry.metrics import CONTENT_TYPE
from bulletserve.version import __version__

_log = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def create_app(
    open_requests: OpenRequests,
    codec: TextCodec,
    settings: ServerSettings,
    bodies: Bodies,
    defaults: GenerationDefaults = GenerationDefaults(),  # noqa: B008 (frozen)
    watchers: Sequence[Watcher] = (),
) -> FastAPI:
    """The application over one engine. It listens to the engine from its start-up on. `bodies`: whoever ends it ends
    those first.

    `defaults` are the checkpoint's sampling values for requests that set none; `watchers` are told of each request.
    """
    if settings.tool_call_parser is not None and not codec.shows_tools:
        _log.warning(
            "--enable-auto-tool-choice: there is no chat template that shows the model tools, so tool_choice auto is "
            "refused: give one that does with --chat-template FILE"
        )
    ids = PromptIds(codec, request_templates=settings.request_templates)
    prompts = PromptMaker(
        codec,
        open_requests,
        ids,
        defaults=defaults,
        classes=slo_classes(settings.slo, settings.slo_classes),
        call_format=None if settings.tool_call_parser is None else FORMATS[settings.tool_call_parser],
    )
    endpoints = _Endpoints(open_requests, prompts, bodies, settings)
    texts = TextEndpoints(ids, prompts, codec, open_requests, bodies, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        open_requests.start()
        yield
        ids.close()

    app = FastAPI(title="Bullet", version=__version__, lifespan=lifespan, redirect_slashes=False, openapi_url=None)
    app.add_middleware(Doorway, api_keys=settings.api_keys, root_path=settings.root_path, watchers=watchers)
    if settings.allowed_origins:  # outside of the doorway: a browser's first question brings no key
        app.add_middleware(
            CrossOrigin,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_exception_handler(BulletError, on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, on_error)
    routes: dict[str, tuple[str, Handler, type[BaseModel] | None]] = {
        "/v1/chat/completions": ("POST", endpoints.chat, ChatBody),
        "/v1/completions": ("POST", endpoints.completions, CompletionBody),
        "/v1/models": ("GET", endpoints.models, None),
        "/v1/models/{name:path}": ("GET", endpoints.model, None),
        "/health": ("GET", endpoints.health, None),
        "/ping": ("GET", endpoints.ping, None),
        "/version": ("GET", endpoints.version, None),
        "/tokenize": ("POST", texts.tokenize, TokenizeBody),
        "/detokenize": ("POST", texts.detokenize, DetokenizeBody),
        "/reset_prefix_cache": ("POST", endpoints.reset_prefix_cache, None),
        "/flush_cache": ("POST", endpoints.reset_prefix_cache, None),
        "/metrics": ("GET", endpoints.metrics, None),
    }
    schemas = {path: body for path, (_, _, body) in routes.items() if body is not None}
    routes["/openapi.json"] = ("GET", openapi.endpoint(schemas), None)
    for path, (method, handler, _) in routes.items():
        app.add_route(path, handler, methods=[method])
    return app


class _Endpoints:
    """One method per path."""

    def __init__(
        self, open_requests: OpenRequests, prompts: PromptMaker, bodies: Bodies, settings: ServerSettings
    ) -> None:
        self._open_requests = open_requests
        self._prompts = prompts
        self._bodies = bodies
        self._settings = settings
        self._started = int(time.time())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        body = parse_body(ChatBody, await self._bodies.read(request))
        model = self._model(body.model)
        return self._answer(request, body, await self._prompts.chat(body), model, chat=True)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        body = parse_body(CompletionBody, await self._bodies.read(request))
        model = self._model(body.model)
        return self._answer(request, body, await self._prompts.completion(body), model, chat=False)

    async def models(self, _: Request) -> Response:
        """GET /v1/models"""
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._settings.served_names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME"""
        return JSONResponse(self._card(self._model(request.path_params["name"])))

    async def health(self, _: Request) -> Response:
        """GET /health: 200 only while the engine can make progress."""
        trouble = self._open_requests.trouble()
        if trouble is None:
            return JSONResponse({"status": "ok"})
        return error_response(HttpError(503, trouble, "unhealthy"))

    async def ping(self, _: Request) -> Response:
        """GET /ping: 200 while the front is there."""
        return JSONResponse({})

    async def version(self, _: Request) -> Response:
        """GET /version"""
        return JSONResponse({"version": __version__})

    async def metrics(self, _: Request) -> Response:
        """GET /metrics"""
        return Response(self._open_requests.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def reset_prefix_cache(self, _: Request) -> Response:
        """POST /reset_prefix_cache: forget every cached prefix. Off by default: it would slow down everybody else."""
        if not self._settings.cache_reset:
            raise HttpError(403, "the prefix cache is emptied by bullet serve --enable-cache-reset only")
        self._open_requests.reset_cache()
        return JSONResponse({"success": True})

    def _model(self, name: str | None) -> str:
        return served_name(name, self._settings.served_names)

    def _card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "bullet",
            "root": self._open_requests.info.model_name,
            "max_model_len": self._open_requests.info.max_model_len,
        }

    def _answer(self, request: Request, body: CommonBody, prompts: list[Prompt], model: str, *, chat: bool) -> Response:
        facts = facts_of(request.scope)
        facts.model = model
        if body.request_id is not None and not facts.is_named:  # a header says it louder
            facts.request_id = body.request_id
        prefix = "chatcmpl-" if chat else "cmpl-"
        options = body.stream_options
        return Answering(
            self._open_requests,
            prompts,
            AnswerHead(prefix + facts.request_id, int(time.time()), model, chat),
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
        )


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers, path = dict(error.headers or {}), request.scope["path"]
    message = None
    if error.status_code == 404:
        message = f"there is no {path[:100]} here; a base URL for clients ends in /v1, such as {_base(request)}/v1"
    elif error.status_code == 405:
        message = f"{path[:100]} takes {headers.get('Allow', 'another method')}, not {request.method}"
    return plain_error(error.status_code, headers, message)


def _base(request: Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc}"[:200]
