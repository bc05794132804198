"""The engine's end: outputs go out, submissions come in.

Knows nothing about the loop behind it: it speaks as an `Outlet` and posts to a `Poster`. Two threads use it. The
loop's thread sends, which never blocks (ZeroMQ queues without a limit and its own thread writes, without the GIL).
A receiving thread decodes, names the blocks of each prompt (hashing, off the loop's thread) and posts events.
"""

import logging
import threading
from array import array
from dataclasses import replace

import zmq

from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.events import Aborted, Arrived, Output, Status
from bulletserve.core.ports import Poster
from bulletserve.core.prefix import block_hashes
from bulletserve.core.request import Request
from bulletserve.transport.addresses import Addresses
from bulletserve.transport.messages import (
    Abort,
    BadMessage,
    Fatal,
    Submit,
    ToEngine,
    ToFront,
    to_engine_codec,
    to_front_codec,
)

_LAST_WORDS_MS = 2000

_log = logging.getLogger(__name__)


class EngineEnd:
    """An `Outlet` over ZeroMQ, and the thread that feeds a `Poster`.

    `emit`, `report`, `ready` and `fatal` are for one thread (the loop's); `close` for any. Prompts get their
    `block_hashes` for blocks of `block_size` tokens, none if it is None (prefix caching off).
    """

    def __init__(self, addresses: Addresses, poster: Poster, *, block_size: int | None) -> None:
        self._poster = poster
        self._block_size = block_size
        self._codec = to_front_codec()
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUSH)
        self._out.set_hwm(0)
        self._out.setsockopt(zmq.LINGER, _LAST_WORDS_MS)
        self._out.connect(addresses.to_front)
        self._in = self._context.socket(zmq.PULL)
        self._in.set_hwm(0)
        self._in.connect(addresses.to_engine)
        self._receiver = threading.Thread(target=self._receive, name="submissions", daemon=True)
        self._receiver.start()

    def emit(self, output: Output) -> None:
        """Hand over one turn's outputs."""
        self._send(output)

    def report(self, status: Status) -> None:
        """Hand over the engine's status."""
        self._send(status)

    def ready(self, info: EngineInfo) -> None:
        """Say, once, that requests can come."""
        self._send(info)

    def fatal(self, message: str) -> None:
        """Say why the engine is about to end. `close` waits until it is sent."""
        self._send(Fatal(message))

    def close(self) -> None:
        """Send what is queued (2 s at most) and end the receiving thread. May be called again."""
        if self._context.closed:
            return
        self._out.close()
        self._context.term()  # wakes the receiving thread, which closes its socket
        self._receiver.join()

    def _send(self, message: ToFront) -> None:
        try:
            self._out.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the front is gone, or we are closed: nobody to tell
            _log.warning("a %s was not sent: %s", type(message).__name__, error)

    def _receive(self) -> None:
        codec = to_engine_codec()
        while True:
            try:
                data = self._in.recv()
            except zmq.ContextTerminated:
                self._in.close(0)
                return
            try:
                self._post(codec.decode(data))
            except BadMessage as error:
                _log.error("dropped a message from the front: %s", error)
            except Exception:  # the thread must go on: nobody else would hear the front
                _log.exception("a message from the front was not handled")

    def _post(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            for request in message.requests:
                self._poster.post(Arrived(self._prepared(request)))
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self._poster.post(Aborted(request_id))
        else:
            self._poster.post(message)

    def _prepared(self, request: Request) -> Request:
        """What the loop would else do in its own time: name the prompt's blocks, pack its numbers."""
        packed = array("q", request.prompt_ids)
        hashes = block_hashes(packed, self._block_size, request.cache_salt) if self._block_size is not None else ()
        return replace(request, prompt_ids=packed, block_hashes=hashes)
