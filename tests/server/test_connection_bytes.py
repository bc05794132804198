"""What a connection does with bytes that are neither a body nor an end, and with those that nobody wants any more."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.scripted_server import serving
from tests.server.conftest import Served
from tests.server.test_connection import connect, is_cut

LIMIT_S = 0.5
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'
GET = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("model")
    with serving(folder, header_timeout_s=LIMIT_S, body_timeout_s=LIMIT_S) as served:
        yield served


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    lines = [b"POST %s HTTP/1.1" % path, b"host: x", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


def received(connection: socket.socket, until: bytes = b"") -> bytes:
    """All that comes until it is closed, or until `until` has come."""
    data = b""
    try:
        while not (until and until in data) and (more := connection.recv(65536)):
            data += more
    except ConnectionResetError:
        pass
    return data


def sent_in_vain(connection: socket.socket, piece: bytes, seconds: float, pause_s: float = 0.0) -> int:
    """Send `piece` again and again until the connection ends; bytes that were sent."""
    count, until_s = 0, time.monotonic() + seconds
    try:
        while time.monotonic() < until_s:
            connection.sendall(piece)
            count += len(piece)
            time.sleep(pause_s)
    except OSError:
        return count
    raise AssertionError(f"{count} bytes were taken for {seconds} s")


@pytest.mark.parametrize("piece", [b"X: y\r\n" * 10_000, b"X" * 65_536, b"X: " + b"y" * 65_536])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/ping", b"/nowhere"])
def test_trailers_without_an_end(hasty: Served, piece: bytes, path: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(CHUNKED.replace(b"/v1/completions", path) + b"2\r\n{}\r\n0\r\n")
        assert sent_in_vain(connection, piece, 20) < 64 * 2**20
    assert hasty.http.get("/ping").status_code == 200


def test_usual_trailers_are_let_pass(hasty: Served) -> None:
    hasty.say("b")
    with connect(hasty) as connection:
        connection.sendall(CHUNKED + b"%x\r\n%s\r\n0\r\nx-checksum: 1\r\n\r\n" % (len(BODY), BODY) + GET)
        assert received(connection, b'"version"').count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("rest", [b"", b"x", b"2\r\nxx\r\n"])
@pytest.mark.parametrize("head", [CHUNKED, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"])
def test_a_refusal_before_the_body_has_ended_closes(hasty: Served, head: bytes, rest: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(head.replace(b"/v1/completions", b"/nowhere"))
        assert b"connection: close" in received(connection, b"}}")
        connection.sendall(rest)
        began_s = time.monotonic()
        assert is_cut(connection)
        assert time.monotonic() - began_s < 10


def test_a_body_that_goes_on_for_ever_after_a_refusal(hasty: Served) -> None:
    with connect(hasty) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        sent_in_vain(connection, b"x", 20, 0.05)
    with connect(hasty) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        assert sent_in_vain(connection, b"x" * 65_536, 20) < 64 * 2**20


def test_empty_lines_between_requests_are_no_reason_to_wait(hasty: Served) -> None:
    with connect(hasty) as connection:
        connection.sendall(GET)
        received(connection, b'"version"')
        connection.sendall(b"\r\n")
        assert is_cut(connection)


@pytest.mark.parametrize("wish", [b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAA", b"Upgrade: websocket"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_wish_to_upgrade_is_not_heard(hasty: Served, wish: bytes, apart: bool) -> None:
    hasty.say("b")
    request = post(BODY, b"Connection: Upgrade, HTTP2-Settings", wish)
    with connect(hasty) as connection:
        for piece in (request[: -len(BODY)], BODY + GET) if apart else (request + GET,):
            connection.sendall(piece)
            time.sleep(0.05)
        assert received(connection, b'"version"').count(b"HTTP/1.1 200") == 2


def test_connect_is_refused(hasty: Served) -> None:
    with connect(hasty) as connection:
        connection.sendall(b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.1 405")


@pytest.mark.parametrize("before", [b"", GET, post(BODY)])
@pytest.mark.parametrize("address", [b"/\xff", b"//[", b"http://[::1", b"*", b"x", b"/%ff%00", b"http://x:99999999/"])
def test_odd_addresses(hasty: Served, before: bytes, address: bytes, caplog: pytest.LogCaptureFixture) -> None:
    hasty.say("b")
    with connect(hasty) as connection:
        connection.sendall(before + b"GET " + address + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answers = received(connection)
    assert answers.count(b"HTTP/1.1 200") == bool(before) and answers.count(b"HTTP/1.1 40") == 1, answers
    assert not [each for each in caplog.records if each.exc_info]


def test_thousands_of_requests_in_one_go(hasty: Served) -> None:
    with connect(hasty) as connection:
        connection.sendall(GET * 3000)
        data = b""
        while data.count(b"HTTP/1.1 200") < 3000:
            more = connection.recv(1 << 20)
            assert more, data[-300:]
            data += more


@pytest.mark.parametrize("bad", [b"GET /version HTTP/1.1\r\nHo", b"nonsense\r\n\r\n", GET.replace(b"x", b"x" * 70_000)])
def test_what_comes_behind_a_request_does_it_no_harm(hasty: Served, bad: bytes) -> None:
    hasty.say("b")
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "u" * 150_000}).encode()
    with connect(hasty) as connection:
        connection.sendall(post(body) + bad)
        answers = received(connection)
    assert answers.startswith(b"HTTP/1.1 200") and b'"text"' in answers
    assert (b"HTTP/1.1 4" in answers) == (bad[-2:] != b"Ho")


def test_headers_are_counted_to_the_byte(hasty: Served) -> None:
    for size, status in ((60_000, b"200"), (64_000, b"200"), (66_000, b"431"), (120_000, b"431")):
        for header in (b"x: " + b"a" * size, b"\r\n".join(b"x: " + b"a" * 95 for _ in range(size // 100))):
            with connect(hasty) as connection:
                connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + header + b"\r\n\r\n")
                assert received(connection).startswith(b"HTTP/1.1 " + status), (size, header[:9])
