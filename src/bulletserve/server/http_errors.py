"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`, whatever went wrong.

Knows nothing about routes. No error carries a stack trace or repeats the request: messages are ours and short. The
status decides what clients do: they retry 408, 429 and 5xx, so a client's own mistake must never be one of these.
"""

import json
import math
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from bulletserve.core.errors import BulletError, EngineDied, Overloaded, RequestError

LONGEST_RETRY_S = 3600.0
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
    return Response(json.dumps(error_object(error)), status_of(error), headers, "application/json")


def plain_error(status: int, headers: dict[str, str] | None = None, message: str | None = None) -> Response:
    """The answer for an error that HTTP itself has a phrase for (404, 405), which it has without a `message`."""
    response = error_response(HttpError(status, message or HTTPStatus(status).phrase.lower()))
    response.headers.update(headers or {})
    return response


async def on_error(_: Request, error: Exception) -> Response:
    """Starlette's exception handler for all of ours, and for bugs."""
    return error_response(error)


def _code(error: Exception) -> str:
    return "engine_died" if isinstance(error, EngineDied) else "internal_error"


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 429: "overloaded_error"}.get(status, "invalid_request_error")
