"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`, whatever went wrong.

Knows nothing about routes. No error carries a stack trace or repeats the request: messages are ours and short. The
status decides what clients do: they retry 408, 429 and 5xx, so a client's own mistake must never be one of these.
"""

import asyncio
import json
import math
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bulletserve.core.errors import BulletError, EngineDied, Overloaded, RequestError

LONGEST_RETRY_S = 3600.0
_LINGER_S = 1.0
_LINGER_BYTES = 16 * 2**20
_LONGEST_MESSAGE = 1000


class HttpError(RequestError):
    """A request that fails before its content is looked at."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def error_object(error: Exception) -> dict[str, object]:
    """The JSON body for an error."""
    known = isinstance(error, BulletError)
    message = str(error) if known else "the server made a mistake; its log says more"
    return {
        "error": {
            "message": message[:_LONGEST_MESSAGE],
            "type": _type(status_of(error)),
            "param": error.param if isinstance(error, RequestError) else None,
            "code": error.code if isinstance(error, RequestError) else _code(error),
        }
    }


def status_of(error: Exception) -> int:
    """The HTTP status for an error."""
    if isinstance(error, RequestError):
        return error.status
    return 503 if isinstance(error, EngineDied) else 500


def error_response(error: Exception) -> Response:
    """The whole answer for an error."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(math.ceil(min(max(1.0, error.retry_after_s), LONGEST_RETRY_S)))
    elif status_of(error) == 503:
        headers["retry-after"] = "1"
    elif status_of(error) == 401:
        headers["www-authenticate"] = "Bearer"
    kind = LastResponse if status_of(error) in (408, 413) else Response
    return kind(json.dumps(error_object(error)), status_of(error), headers, "application/json")


def plain_error(status: int, headers: dict[str, str] | None = None) -> Response:
    """The answer for an error that HTTP itself has a phrase for (404, 405)."""
    response = error_response(HttpError(status, HTTPStatus(status).phrase.lower()))
    response.headers.update(headers or {})
    return response


class LastResponse(Response):
    """Closes the connection, for requests whose body will not be read.

    Bytes that are still coming make the kernel reset the connection, and a reset can overtake the answer. So the
    answer is sent at once, and what comes in the next second, up to 16 MiB, is read and thrown away before the
    connection closes.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, linger, close."""
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(_LINGER_S):
                left = _LINGER_BYTES
                while left > 0 and (message := await receive()).get("more_body"):
                    left -= len(message["body"])
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def on_error(_: Request, error: Exception) -> Response:
    """Starlette's exception handler for all of ours, and for bugs."""
    return error_response(error)


def _code(error: Exception) -> str:
    return "engine_died" if isinstance(error, EngineDied) else "internal_error"


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 429: "overloaded_error"}.get(status, "invalid_request_error")
