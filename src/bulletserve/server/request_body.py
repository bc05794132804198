"""Reads a request's body with its limits enforced while it comes: kind, size and time.

Knows nothing about what is in it.
"""

import asyncio

from starlette.requests import ClientDisconnect, Request

from bulletserve.server.http_errors import HttpError
from bulletserve.server.open_requests import ShuttingDown
from bulletserve.server.settings import ServerSettings


class Bodies:
    """Reads bodies as the settings allow. After `end`, by which those that are still coming end, no more are read."""

    def __init__(self, settings: ServerSettings) -> None:
        self._limit_bytes, self._timeout_s = settings.body_limit_bytes, settings.body_timeout_s
        self._coming: set[asyncio.Timeout] = set()
        self._ended = False

    async def read(self, request: Request) -> bytes:
        """The body of a JSON request; a missing content type counts as JSON.

        Raises `HttpError`: 415 for another type, 413 over the limit (as soon as that is known), 408 after the timeout,
        400 if the client leaves half-way; and `ShuttingDown` after `end`.
        """
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise HttpError(
                415, "the content type must be application/json (curl: -H 'content-type: application/json')"
            )
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._limit_bytes:
            raise _too_large(self._limit_bytes)
        body = bytearray()
        try:
            async with asyncio.timeout(0.0 if self._ended else self._timeout_s) as limit:
                self._coming.add(limit)
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._limit_bytes:
                        raise _too_large(self._limit_bytes)
        except TimeoutError:
            if self._ended:
                raise ShuttingDown from None
            raise HttpError(408, f"the body did not arrive within {self._timeout_s:g} s") from None
        except ClientDisconnect:
            raise HttpError(400, "the body ended half-way") from None
        finally:
            self._coming.discard(limit)
        return bytes(body)

    def end(self) -> None:
        """The server is shutting down."""
        self._ended = True
        for limit in self._coming:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())


def _too_large(limit_bytes: int) -> HttpError:
    return HttpError(413, f"the body is larger than the limit of {limit_bytes} bytes")
