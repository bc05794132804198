"""Limits on how long a connection may be held, browsers of other origins, and paths behind a proxy."""

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bulletserve.formats.description import Checkpoint
from tests.cases.scripted_server import serving
from tests.server.conftest import SETTINGS, Served
from tests.server.test_requests import error_of

LIMIT_S = 0.4


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    with serving(folder, header_timeout_s=LIMIT_S, write_timeout_s=LIMIT_S) as served:
        yield served


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.server.port), timeout=20)


def is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", b"GET", b"GET /ping HTTP/1.1\r\nhost: x\r\n"])
def test_a_header_that_never_ends_is_cut_off(hasty: Served, sent: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(sent)
        began_s = time.monotonic()
        assert is_cut(connection)
        assert time.monotonic() - began_s > LIMIT_S / 2


def answer_to(served: Served, *pieces: bytes) -> tuple[bytes, bytes]:
    """Status line and body of what comes back on a connection that is then closed."""
    received = b""
    with connect(served) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.01)
            while data := connection.recv(65536):
                received += data
        except OSError:
            pass
    head, _, body = received.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], body


def test_a_header_without_an_end_is_refused_long_before_its_time(hasty: Served) -> None:
    status, body = answer_to(hasty, b"GET /ping HTTP/1.1\r\nx: ", *[b"a" * 20_000] * 4)
    if status:  # a reset may overtake it
        assert b" 431 " in status and json.loads(body)["error"]["message"]
    assert hasty.http.get("/ping", headers={"x": "a" * 30_000}).status_code == 200


def test_what_is_no_http_is_told_so_in_json(hasty: Served) -> None:
    status, body = answer_to(hasty, b"\x16\x03\x01 hello\r\n\r\n")
    assert b" 400 " in status
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_a_second_request_has_its_own_time(hasty: Served) -> None:
    with connect(hasty) as connection:
        for _ in range(2):
            connection.sendall(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            time.sleep(1.5 * LIMIT_S)  # idle between two requests is another matter
        connection.sendall(b"GET /pi")
        assert is_cut(connection)


def test_who_reads_nothing_of_an_answer_is_cut_off(hasty: Served) -> None:
    hasty.engine.per_step = 200
    hasty.engine.script = lambda request: [hasty.codec.encode("a")[0]] * 240
    prompts = ", ".join(['"a"'] * 8)
    body = b'{"prompt": [%s], "max_tokens": 240, "stream": true}' % prompts.encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", hasty.server.port))
        for _ in range(40):  # answers that nobody takes, one behind the other
            connection.sendall(head + body)
        hasty.wait_until(lambda: len(hasty.engine.arrived) > 8)  # several are under way or written
        port = connection.getsockname()[1]
        connections = hasty.server._uvicorn.server_state.connections
        hasty.wait_until(lambda: all(one.client[1] != port for one in list(connections)))  # type: ignore
    hasty.wait_until(lambda: len(hasty.server.open_requests) == 0)
    assert hasty.http.get("/ping").status_code == 200


def test_who_reads_slowly_gets_all(hasty: Served) -> None:
    hasty.engine.reset()
    hasty.engine.script = lambda request: [hasty.codec.encode("a")[0]] * 240
    body = {"prompt": ["a"] * 8, "max_tokens": 240, "stream": True}
    received = b""
    with hasty.http.stream("POST", "/v1/completions", json=body) as slow:
        for chunk in slow.iter_raw(20_000):
            received += chunk
            time.sleep(0.02)
    assert received.endswith(b"data: [DONE]\n\n") and received.count(b'"text":"a') >= 8 * 239


def test_other_origins_are_served_only_if_named(checkpoint: Checkpoint, served: Served) -> None:
    question = {"origin": "https://a.example", "access-control-request-method": "POST"}
    error_of(served.http.options("/v1/completions", headers=question), 405)
    assert "access-control-allow-origin" not in served.http.get("/v1/models", headers=question).headers
    settings = replace(SETTINGS, allowed_origins=("https://a.example",), api_keys=("key",))
    open_one = Served(checkpoint, settings)
    try:
        allowed = open_one.http.options("/v1/completions", headers=question)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        refused = open_one.http.options("/v1/completions", headers={**question, "origin": "https://b.example"})
        assert refused.status_code == 400 and "origin" in refused.json()["error"]["message"]
        method = open_one.http.options("/v1/models", headers={**question, "access-control-request-method": "PUT"})
        assert method.status_code == 400 and "method" in method.json()["error"]["message"]
        assert method.headers["access-control-allow-origin"] == "https://a.example"
        answer = open_one.http.get("/v1/models", headers={"origin": "https://a.example"})
        assert error_of(answer, 401) and answer.headers["access-control-allow-origin"] == "https://a.example"
    finally:
        open_one.close()


def test_a_proxys_prefix_is_taken_off(tmp_path: Path) -> None:
    with serving(tmp_path, root_path="/llm") as served:
        assert served.http.get("/llm/v1/models").json() == served.http.get("/v1/models").json()
        assert served.http.get("//llm//ping/").status_code == 200
        error_of(served.http.get("/llmx/ping"), 404)
        error_of(served.http.get("/llm"), 404)


def test_the_cache_is_emptied_only_where_that_is_allowed(tmp_path: Path, served: Served) -> None:
    assert "--enable-cache-reset" in error_of(served.http.post("/reset_prefix_cache"), 403)["message"]
    with serving(tmp_path, cache_reset=True) as allowed:
        for path in ("/reset_prefix_cache", "/flush_cache"):
            before = allowed.engine.cache_resets
            assert allowed.http.post(path).json() == {"success": True}
            allowed.wait_until(lambda count=before: allowed.engine.cache_resets == count + 1)  # type: ignore[misc]
        allowed.engine.die("gone")
        allowed.wait_until(lambda: allowed.http.get("/health").status_code == 503)
        error_of(allowed.http.post("/flush_cache"), 503)
