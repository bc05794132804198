"""Reads a request's body with its limits enforced while it comes: kind, size and time.

Knows nothing about what is in it.
"""

import asyncio

from starlette.requests import ClientDisconnect, Request

from bulletserve.server.http_errors import HttpError
from bulletserve.server.settings import ServerSettings


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """The body of a JSON request; a missing content type counts as JSON.

    Raises `HttpError`: 415 for another type, 413 over the limit (as soon as that is known), 408 after the timeout,
    400 if the client leaves half-way.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HttpError(415, "the content type must be application/json (curl: -H 'content-type: application/json')")
    limit_bytes, timeout_s = settings.body_limit_bytes, settings.body_timeout_s
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit_bytes:
        raise _too_large(limit_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    raise _too_large(limit_bytes)
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise HttpError(400, "the body ended half-way") from None
    return bytes(body)


def _too_large(limit_bytes: int) -> HttpError:
    return HttpError(413, f"the body is larger than the limit of {limit_bytes} bytes")
