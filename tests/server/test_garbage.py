"""What the front makes is freed as it is let go: circles would wait for the collector, which stops every stream.

320 requests a second that each left two circles of thirty objects made full collections of 160 to 200 ms, one in five
seconds.
"""

import gc
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from bulletserve.formats.description import Checkpoint
from bulletserve.server.open_requests import ShuttingDown
from tests.server.conftest import Served

OURS = ("bulletserve.", "uvicorn.", "starlette.", "fastapi.")
COMPLETIONS = "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def request(path: str, body: object = None, *, method: str = "POST", more: str = "connection: close\r\n") -> bytes:
    sent = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n{more}content-length: {len(sent)}\r\n\r\n".encode() + sent


STAYS = ""
WHOLE = {"prompt": "hello", "max_tokens": 3}
KINDS = {
    "whole": request(COMPLETIONS, WHOLE),
    "streamed": request(COMPLETIONS, {**WHOLE, "stream": True, "stream_options": {"include_usage": True}}),
    "several": request(COMPLETIONS, {**WHOLE, "prompt": ["a", "b"], "n": 2, "logprobs": 1, "echo": True}),
    "chat": request("/v1/chat/completions", {**CHAT, "stop": ["zzz"]}),
    "stop": request(COMPLETIONS, {**WHOLE, "stop": ["e"], "stream": True}),
    "one after the other": request(COMPLETIONS, WHOLE, more=STAYS) * 2 + request("/health", method="GET"),
    "too many": request(COMPLETIONS, {**WHOLE, "prompt": ["a"] * 9}),
    "malformed": request(COMPLETIONS, b"{"),
    "wrong": request(COMPLETIONS, {"prompt": 5}),
    "no schema": request("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}),
    "nowhere": request("/nowhere", {}),
    "too large": request(COMPLETIONS, b" " * 300_000),
    "tokens": request("/tokenize", {"prompt": "hello"}),
    "models": request("/v1/models", method="GET"),
    "metrics": request("/metrics", method="GET"),
    "another protocol": request("/health", method="GET", more="connection: upgrade, close\r\nupgrade: h2c\r\n"),
    "no request": b"\x00\x01\x02\r\n\r\n",
    "behind a broken one": request("/health", method="GET", more=STAYS) + b"\x00\x01\r\n\r\n",
}


@pytest.fixture(scope="module")
def lonely(checkpoint: Checkpoint) -> Iterator[Served]:
    served = Served(checkpoint)
    for sent in KINDS.values():  # what is made once is made now
        ask(served, sent)
    yield served
    served.close()


def ask(served: Served, sent: bytes) -> bytes:
    """All that comes back on one connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=20) as connection:
        try:
            connection.sendall(sent)
            while data := connection.recv(65536):
                received += data
        except ConnectionError:  # the rest of a body that is too large
            pass
    return received


def circles(served: Served, act: Callable[[], object]) -> Counter[str]:
    """What only the collector finds of all that `act` made in the front, by its type."""
    state = served.server._uvicorn.server_state
    gc.collect()
    gc.disable()
    try:
        act()
        served.wait_until(lambda: not (served.engine.running or state.connections or state.tasks))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    return Counter({kind: count for kind, count in kinds.items() if kind.startswith(OURS)})


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_leaves_no_circle(lonely: Served, kind: str) -> None:
    assert not circles(lonely, lambda: ask(lonely, KINDS[kind]))


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", KINDS["streamed"][:-5], KINDS["streamed"], KINDS["whole"]])
def test_a_client_that_vanishes_leaves_no_circle(lonely: Served, sent: bytes) -> None:
    def vanish() -> None:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", lonely.server.port), timeout=20) as connection:
                connection.sendall(sent)
                time.sleep(0.01)

    assert not circles(lonely, vanish)


def test_what_is_looked_for_is_found(lonely: Served) -> None:
    def knot() -> None:
        made = ShuttingDown()
        made.args = (made,)

    assert circles(lonely, knot) == {"bulletserve.server.open_requests.ShuttingDown": 1}
