"""Which other web pages may ask: what CORS says, its refusals as our errors.

Knows nothing about routes or keys.
"""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from bulletserve.server.http_errors import HttpError, error_response


class CrossOrigin(CORSMiddleware):
    """Starlette's, which refuses in plain text."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser's first question."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refusal = error_response(HttpError(response.status_code, bytes(response.body).decode().lower()))
        for name in ("content-type", "content-length"):
            del response.headers[name]
        refusal.headers.update(response.headers)
        return refusal
