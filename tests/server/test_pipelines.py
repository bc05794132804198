"""Requests one behind the other on a connection: how many there may be, who leaves, what a shutdown does to them."""

import json
import logging
import socket
import threading
from collections.abc import Iterator

import pytest

from bulletserve.server.connection import PARSED_AT_ONCE_BYTES, UNPARSED_BYTES
from tests.cases.scripted_server import serving
from tests.server.conftest import Served
from tests.server.test_lifecycle import endless, request, send

LIMIT_S = 0.4
READ_BYTES = 262_144
"""What the event loop reads at once."""

SHORTEST = b"GET / HTTP/1.1\r\n\r\n"
VERSION = b"GET /version HTTP/1.1\r\nhost: x\r\n%s\r\n"
BROKEN_BODY = b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nno size\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    with serving(folder, header_timeout_s=LIMIT_S, write_timeout_s=LIMIT_S, body_timeout_s=LIMIT_S) as served:
        yield served


def of_port(served: Served, port: int) -> list[object]:
    connections = list(served.server._uvicorn.server_state.connections)
    return [one for one in connections if one.client[1] == port]  # type: ignore[union-attr, index]


def all_that_comes(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


def test_few_requests_are_parsed_before_their_turn_and_all_are_answered(served: Served) -> None:
    count, found = 40_000, [0, 0, 0]
    answers = 0
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=60) as connection:
        port = connection.getsockname()[1]
        sender = threading.Thread(
            target=lambda: connection.sendall(SHORTEST * count + VERSION % b"connection: close\r\n")
        )
        sender.start()
        while data := connection.recv(65536):
            answers += data.count(b"HTTP/1.1 ")
            for one in of_port(served, port):
                seen = len(one.pipeline), len(one._unparsed), len(one._unanswered)  # type: ignore[attr-defined]
                found = [max(pair) for pair in zip(found, seen, strict=True)]
        sender.join()
    assert answers >= count  # a status line may lie across two reads
    most = PARSED_AT_ONCE_BYTES // len(SHORTEST) + 2
    assert 0 < found[0] <= most and found[2] <= most
    assert 0 < found[1] <= UNPARSED_BYTES + READ_BYTES + len(SHORTEST)


@pytest.mark.parametrize("tail", [b"", VERSION % b"", BROKEN_BODY, b"BROKEN\r\n\r\n", SHORTEST * 1000], ids=len)
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_with_requests_behind_is_forgotten_at_once(
    served: Served, stream: bool, tail: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    endless(served)
    before = served.server.open_requests.metrics.finished["abort"]
    with caplog.at_level(logging.ERROR):
        with send(
            served, *request({"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": stream})
        ) as connection:
            served.wait_until(lambda: len(served.engine.running) == 1)
            connection.sendall(tail)
        served.wait_until(lambda: not served.engine.running and not served.server._uvicorn.server_state.tasks)
    assert served.server.open_requests.metrics.finished["abort"] == before + 1
    assert len(served.engine.aborted) == 1
    assert not caplog.records


def test_who_sends_no_more_and_reads_nothing_is_cut_off_in_the_middle_of_a_request(hasty: Served) -> None:
    hasty.engine.per_step = 200
    hasty.engine.script = lambda request: [hasty.codec.encode("a")[0]] * 240
    head, body = request({"prompt": ["a"] * 8, "max_tokens": 240, "stream": True})
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", hasty.server.port))
        port = connection.getsockname()[1]
        connection.sendall((head + body) * 8)
        hasty.wait_until(lambda: len(hasty.engine.arrived) > 1)
        connection.shutdown(socket.SHUT_WR)
        hasty.wait_until(lambda: not of_port(hasty, port))
    hasty.wait_until(lambda: len(hasty.server.open_requests) == 0)


@pytest.mark.parametrize("behind", [b"", VERSION % b""])
@pytest.mark.parametrize("half", [b"content-length: 16\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"])
@pytest.mark.parametrize("path", [b"/tokenize", b"/v1/completions"])
def test_a_body_that_still_comes_as_the_server_shuts_down_is_a_503(
    fresh: Served, path: bytes, half: bytes, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), send(fresh, behind + b"POST %s HTTP/1.1\r\nhost: x\r\n" % path + half) as one:
        state = fresh.server._uvicorn.server_state
        fresh.wait_until(lambda: len(state.tasks) == 1 and state.total_requests == bool(behind))
        fresh.server.shutdown(0)
        answer = all_that_comes(one)
        fresh.wait_until(lambda: not fresh.thread.is_alive())
    *_, head, body = answer.split(b"\r\n\r\n")
    assert b"HTTP/1.1 503 " in (head if not behind else answer)
    assert json.loads(body)["error"]["code"] == "shutting_down"
    assert not caplog.records


def test_thousands_of_wishes_for_another_protocol_are_answered_in_this_one(served: Served) -> None:
    wish = VERSION % b"connection: upgrade\r\nupgrade: x\r\n"
    with send(served, wish * 3000 + VERSION % b"connection: close\r\n") as connection:
        answer = all_that_comes(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == 3001


def test_a_trailer_that_ends_the_connection_does_so_and_says_so(served: Served) -> None:
    body = b'{"prompt": "a"}'
    sent = CHUNKED + b"%x\r\n%s\r\n0\r\nconnection: close\r\n\r\n" % (len(body), body)
    with send(served, sent + VERSION % b"") as connection:
        answer = all_that_comes(connection)
    assert answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer


def test_a_wrong_address_says_what_is_right(served: Served) -> None:
    answer = served.http.post("/chat/completions", json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        f"there is no /chat/completions here; a base URL for clients ends in /v1, such as {served.url}/v1"
    )
    answer = served.http.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "/v1/chat/completions takes POST, not GET"
