"""What every HTTP request passes before any route: its path made regular, its id, its API key.

Knows nothing about what the routes do.
"""

import re
import uuid
from collections.abc import Sequence
from hmac import compare_digest

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bulletserve.server.http_errors import HttpError, error_response

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""Paths that need no API key."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Doorway:
    """ASGI middleware.

    Runs of slashes count as one (clients join base and path carelessly), one at the end as none. `x-request-id` comes
    back as it was sent, or is made. With `api_keys` every path outside `OPEN_PATHS` needs one of them.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = re.sub("/{2,}", "/", scope["path"])
        scope = {**scope, "path": path.rstrip("/") or "/"}
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        if self._api_keys and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            refusal = error_response(HttpError(401, "a valid API key is needed: Authorization: Bearer KEY"))
            await refusal(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        token = given.strip().encode("latin-1", "replace")
        # every key is compared, so that the time tells nothing
        matches = [compare_digest(token, key) for key in self._api_keys]
        return scheme.lower() == "bearer" and any(matches)
