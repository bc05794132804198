"""One client's connection, with the limits that the HTTP server itself does not have.

Knows nothing about requests. There are two ways to hold a connection for ever: to send a header byte by byte (or
nothing at all), and to stop reading an answer; and one to fill memory: a header without an end. Bodies have limits of
their own (`request_body`).
"""

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from bulletserve.server.http_errors import HttpError, error_object

HEADER_LIMIT_BYTES = 65536


def limited_connections(header_timeout_s: float, write_timeout_s: float) -> type[asyncio.Protocol]:
    """The class of a server's connections.

    A connection is cut that has not sent a whole header `header_timeout_s` after it was opened or after the first byte
    of a later request, or whose buffers have been full for `write_timeout_s` without anything being taken from them.
    """

    class LimitedConnection(HttpToolsProtocol):
        _header_timer: asyncio.TimerHandle | None = None
        _in_header = False
        _header_bytes = 0
        _write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.access_log = False  # it would have query strings in it; `request_log` has not
            self._wait_for_header()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._header_bytes = self._header_bytes + len(data) if self._in_header else 0
            if self._header_bytes > HEADER_LIMIT_BYTES and not self.transport.is_closing():
                self._refuse(HttpError(431, f"the header is larger than the limit of {HEADER_LIMIT_BYTES} bytes"))

        def send_400_response(self, msg: str) -> None:
            self._refuse(HttpError(400, "this is no HTTP request"))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_header = True
            if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
                self._wait_for_header()

        def on_headers_complete(self) -> None:
            _cancel(self._header_timer)
            self._header_timer, self._in_header = None, False
            super().on_headers_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._in_header:  # of a request behind this one: it was we who read nothing meanwhile
                self._wait_for_header()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait_for_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            _cancel(self._write_timer)

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._wait_for_reader()  # what was written is sent before it closes

        def connection_lost(self, exc: Exception | None) -> None:
            _cancel(self._header_timer)
            _cancel(self._write_timer)
            super().connection_lost(exc)

        def _wait_for_reader(self, full_bytes: int | None = None) -> None:
            """Look again after the limit: less in the buffer than before means that somebody reads, if slowly."""
            left_bytes = self.transport.get_write_buffer_size()
            if full_bytes is not None and left_bytes >= full_bytes:
                self.transport.abort()
                return
            _cancel(self._write_timer)
            self._write_timer = self.loop.call_later(write_timeout_s, self._wait_for_reader, left_bytes)

        def _refuse(self, error: HttpError) -> None:
            body = json.dumps(error_object(error)).encode()
            kind = b"content-type: application/json\r\nconnection: close\r\n"
            length = b"content-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + kind + length + body)
            self.transport.close()

        def _wait_for_header(self) -> None:
            self._header_timer = self.loop.call_later(header_timeout_s, self.transport.abort)

    return LimitedConnection


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
