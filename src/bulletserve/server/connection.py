"""One client's connection, with the limits that the HTTP server itself does not have.

Knows nothing about requests. A connection can be held for ever by who sends nothing, or little at a time, and by who
reads nothing; memory can be filled by what is neither a body nor at an end: headers, trailers, what frames chunks. So
there is always a time limit for whoever's turn it is, and such bytes are counted. Requests may be sent one behind the
other: few are parsed before their turn, the rest waits as bytes, and soon is not read. Bodies have limits of their own
while they are wanted (`request_body`). Where an answer is there before its request has ended, the rest is read for a
moment and thrown away (bytes that come to a closed socket make the kernel reset the connection, and a reset can
overtake the answer), and the connection closes.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from bulletserve.server.http_errors import HttpError, error_object
from bulletserve.server.upgrades import without_upgrade

HEADER_LIMIT_BYTES = 65536
"""Of one request's line, headers and trailers; and, to within one read, of what belongs to nothing yet."""

PARSED_AT_ONCE_BYTES = 4096
"""After so many it is looked whether requests wait for their turn; then no more are parsed. The shortest has 18."""

UNPARSED_BYTES = 65536
"""With more than that nothing is read. With less it is, or nobody would hear that the client has left."""

LINGER_S = 1.0
LINGER_BYTES = 16 * 1024 * 1024


def limited_connections(header_timeout_s: float, write_timeout_s: float) -> type[asyncio.Protocol]:
    """The class of a server's connections.

    A connection is cut that has not sent a whole header `header_timeout_s` after it was opened or after the first byte
    of a later request, or whose buffers have been full for `write_timeout_s` without anything being taken from them.
    """

    class LimitedConnection(HttpToolsProtocol):
        _header_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None
        _in_header = False
        _in_message = False
        _keeps_alive = True
        _header_bytes = 0
        _unknown_bytes = 0
        _too_large = False
        _refusal: HttpError | None = None
        _thrown_away: int | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.flow: _Flow = _Flow(transport)
            self._unparsed = bytearray()
            self._unanswered: deque[RequestResponseCycle] = deque()
            self.access_log = False  # it would have query strings in it; `request_log` has not
            self._wait_for_header()

        def data_received(self, data: bytes) -> None:
            if self._thrown_away is not None:
                self._throw_away(len(data))
                return
            self._unparsed += data
            self._parse()

        def _parse(self) -> None:
            """As far as no request waits for its turn."""
            self._unset_keepalive_if_required()
            while self._unparsed and not self.pipeline:
                piece = bytes(self._unparsed[:PARSED_AT_ONCE_BYTES])
                del self._unparsed[:PARSED_AT_ONCE_BYTES]
                self._unknown_bytes += len(piece)
                self._feed(piece)
                if self._unknown_bytes > HEADER_LIMIT_BYTES and self._thrown_away is None:
                    self._refuse(_header_too_large())
                if self._thrown_away is not None or self.transport.is_closing():
                    self._unparsed.clear()
            self.flow.hold(len(self._unparsed) > UNPARSED_BYTES)
            if not (self._in_message or self._unanswered or self._thrown_away is not None):
                self._wait_for_header()  # of a request that may be about to begin

        def _feed(self, data: bytes) -> None:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(HttpError(405, "method not allowed"))
                    return
                head = without_upgrade(self.parser, self.url, self.headers)
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as at first
                self._feed(head + data[upgrade.args[0] :])
            except httptools.HttpParserError:
                self._refuse(_header_too_large() if self._too_large else HttpError(400, "this is no HTTP request"))

        # what the parser finds: each is the end of what was unknown

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_header = self._in_message = True
            self._header_bytes = self._unknown_bytes = 0
            if not self._unanswered:
                self._wait_for_header()

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            self._count(len(url))

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + len(b": \r\n"))
            if self._in_header:  # else it is a trailer, which nobody asks for
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._unknown_bytes = 0
            if self.parser.should_upgrade():
                return
            super().on_headers_complete()  # raises for an address that is none
            self._stop_waiting()
            self._in_header = False
            self._unanswered.append(self.cycle)
            self.flow.resume_reading()  # to hear of an end, also where a request waits for its turn
            self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False  # unless all of it is read
            self.cycle.transport = _Answers(self.transport, self._close_after_answer)  # type: ignore[assignment]

        def on_chunk_header(self) -> None:
            self._unknown_bytes = 0

        def on_body(self, body: bytes) -> None:
            self._unknown_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._unknown_bytes = 0
            if self.parser.should_upgrade():
                return
            self._in_message = False
            self._keeps_alive &= self.parser.should_keep_alive()  # a trailer may end it
            if not self.cycle.response_started:
                self.cycle.keep_alive = self._keeps_alive
            super().on_message_complete()

        def on_response_complete(self) -> None:
            self._unanswered.popleft()
            super().on_response_complete()
            if self._unparsed and not self.transport.is_closing():
                self._parse()
            if self.transport.is_closing() or self._unanswered:
                return
            if self._thrown_away is not None:
                self._unset_keepalive_if_required()
                if self._refusal is not None:
                    self._tell(self._refusal)
            elif self._in_header:  # of a request behind this one: it was we who read nothing meanwhile
                self._wait_for_header()

        # whose turn it is

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait_for_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            if not self.transport.is_closing():  # else all of it must be taken
                _cancel(self._write_timer)

        def shutdown(self) -> None:
            self._keeps_alive = False
            super().shutdown()
            if self.transport.is_closing():
                self._wait_for_reader()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._wait_for_reader()  # what was written is sent before it closes

        def eof_received(self) -> None:
            """Whoever sends no more counts as gone: what has been written is sent before the loop closes it."""
            self._tell_that_client_left()
            self._wait_for_reader()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            _cancel(self._write_timer)
            self._tell_that_client_left()
            super().connection_lost(exc)
            # What would keep this connection alive until the garbage collector comes, whose pauses grow with what it
            # finds: an answer's way to close it.
            self.cycle = None  # type: ignore[assignment]
            self.pipeline.clear()
            self._unanswered.clear()

        def _tell_that_client_left(self) -> None:
            for cycle in self._unanswered:  # the first is running, the others wait
                cycle.disconnected = True
                cycle.message_event.set()
            self._unparsed.clear()

        def _wait_for_reader(self, full_bytes: int | None = None) -> None:
            """Look again after the limit: less in the buffer than before means that somebody reads, if slowly."""
            left_bytes = self.transport.get_write_buffer_size()
            if full_bytes is not None and left_bytes >= full_bytes:
                self.transport.abort()
                return
            _cancel(self._write_timer)
            self._write_timer = self.loop.call_later(write_timeout_s, self._wait_for_reader, left_bytes)

        def _wait_for_header(self) -> None:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(header_timeout_s, self.transport.abort)

        def _stop_waiting(self) -> None:
            _cancel(self._header_timer)
            self._header_timer = None

        # the end

        def _count(self, header_bytes: int) -> None:
            self._unknown_bytes = 0
            self._header_bytes += header_bytes
            if self._header_bytes > HEADER_LIMIT_BYTES:
                self._too_large = True
                raise ValueError("the header is too large")  # ends the parser's work

        def _refuse(self, error: HttpError) -> None:
            """Nothing more is parsed. Requests before this one are answered first."""
            self._stop_waiting()
            self._thrown_away = 0
            if self._in_message and not self._in_header:  # the body, or a trailer, of the last request is at fault
                if self.pipeline:
                    self.pipeline.popleft()
                    self._unanswered.pop()
                    self.cycle = self._unanswered[-1]
                else:
                    self.cycle.disconnected = True
                    self.cycle.message_event.set()
                    if self.cycle.response_started:
                        self.transport.abort()
                        return
                    self._unanswered.clear()
            if self._unanswered:
                self._refusal = error
                return
            self._tell(error)

        def _tell(self, error: HttpError) -> None:
            body = json.dumps(error_object(error)).encode()
            kind = b"content-type: application/json\r\nconnection: close\r\n"
            length = b"content-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + kind + length + body)
            self._linger()

        def _close_after_answer(self) -> None:
            if self._in_message and not self._in_header and len(self._unanswered) == 1:
                self._linger()
            else:
                self._close()

        def _linger(self) -> None:
            self._thrown_away = 0
            self._stop_waiting()
            self._header_timer = self.loop.call_later(LINGER_S, self._close)

        def _close(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()
                self._wait_for_reader()

        def _throw_away(self, more_bytes: int) -> None:
            assert self._thrown_away is not None
            self._thrown_away += more_bytes
            if self._thrown_away > LINGER_BYTES:
                self.transport.abort()

    return LimitedConnection


class _Flow(FlowControl):
    """Reading, which nobody resumes while it is held."""

    _held = False

    def resume_reading(self) -> None:
        if not self._held:
            super().resume_reading()

    def hold(self, held: bool) -> None:
        """Whether more is there than can be gone through."""
        was_held, self._held = self._held, held
        if self._transport.is_closing():
            return
        if held:
            self.pause_reading()
        elif was_held:
            self.resume_reading()


class _Answers:
    """A transport as an answer sees it: how it closes is the connection's matter."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


def _header_too_large() -> HttpError:
    return HttpError(431, f"the header is larger than the limit of {HEADER_LIMIT_BYTES} bytes")


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
