"""What every HTTP request passes before any route: its path made regular, its id, its API key.

Knows nothing about what the routes do.
"""

import asyncio
import logging
import re
import uuid
from collections.abc import Sequence
from hmac import compare_digest

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bulletserve.server.http_errors import HttpError, error_response
from bulletserve.server.open_requests import ShuttingDown
from bulletserve.server.protocol import REQUEST_ID
from bulletserve.server.request_facts import RequestFacts, Watcher, keep_facts

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""Paths that need no API key."""

_TRACEPARENT = re.compile(r"[0-9a-f-]{55,128}")

_log = logging.getLogger(__name__)


class Doorway:
    """ASGI middleware.

    `root_path`, which a proxy puts before every path, is taken off. Runs of slashes count as one (clients join base and
    path carelessly), one at the end as none. `x-request-id` comes back as it was sent, or is made. With `api_keys`
    every path outside `OPEN_PATHS` needs one of them. `watchers` are told of each request when it has ended.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str] = (), root_path: str = "", watchers: Sequence[Watcher] = ()
    ) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in api_keys]
        self._root_path = root_path
        self._watchers = watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope = {**scope, "path": self._path(scope["path"])}
        facts = _facts(scope, headers)
        keep_facts(scope, facts)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = facts.request_id
            await send(message)

        try:
            if self._api_keys and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
                refusal = error_response(HttpError(401, "a valid API key is needed: Authorization: Bearer KEY"))
                await refusal(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # by whoever ends the server, when there is no more time
            if not facts.status:
                refusal = error_response(ShuttingDown())
                await refusal(scope, receive, send_with_id)
        finally:
            facts.ended()
            self._tell(facts)

    def _path(self, path: str) -> str:
        path = re.sub("/{2,}", "/", path)
        if self._root_path and f"{path}/".startswith(f"{self._root_path}/"):
            path = path[len(self._root_path) :]
        return path.rstrip("/") or "/"

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        token = given.strip().encode("latin-1", "replace")
        # every key is compared, so that the time tells nothing
        matches = [compare_digest(token, key) for key in self._api_keys]
        return scheme.lower() == "bearer" and any(matches)

    def _tell(self, facts: RequestFacts) -> None:
        for watcher in self._watchers:
            try:
                watcher(facts)
            except Exception:  # the request has been answered: whoever notes it down must not change that
                _log.exception("a request was not noted down")


def _facts(scope: Scope, headers: Headers) -> RequestFacts:
    given = headers.get("x-request-id", "")
    named = REQUEST_ID.fullmatch(given) is not None
    client = scope.get("client")
    trace = headers.get("traceparent", "")
    return RequestFacts(
        given if named else uuid.uuid4().hex,
        named,
        scope["method"],
        scope["path"],
        client=client[0] if client else "",
        traceparent=trace if _TRACEPARENT.fullmatch(trace) else "",
    )
