"""Case 12: bodies over the limit, errors about much that is wrong, and senders that take their time."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.cases.live_streams import LiveStream
from tests.cases.scripted_server import serving
from tests.server.conftest import SETTINGS, Served
from tests.server.test_requests import error_of

MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("model"), body_limit_bytes=8 * MIB, header_timeout_s=0.5) as server:
        server.say("fine")
        yield server


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.server.port), timeout=10)


def send_much(served: Served, megabytes: int, *, chunked: bool) -> tuple[int, bytes]:
    """How much of such a body could be sent, and what came back before the connection was cut."""
    sent = 0
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % (megabytes * MIB)
    with connect(served) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + length + b"\r\n\r\n")
        block = (b"%x\r\n" % MIB if chunked else b"") + b" " * MIB + (b"\r\n" if chunked else b"")
        try:
            while sent < megabytes:
                connection.sendall(block)
                sent += 1
        except OSError:
            pass
        try:
            return sent, connection.recv(65536)
        except ConnectionResetError:
            return sent, b""


@pytest.mark.parametrize("megabytes", [50, 500])
@pytest.mark.parametrize("chunked", [False, True])
def test_case_12_a_body_over_the_limit_is_refused_without_reading_it_all(
    served: Served, megabytes: int, chunked: bool
) -> None:
    """The sender is cut off: it can write no more than the limit and what the sockets hold."""
    before = resident_bytes()
    sent, answer = send_much(served, megabytes, chunked=chunked)
    assert sent < megabytes
    assert not answer or b" 413 " in answer.partition(b"\r\n")[0]
    assert resident_bytes() - before < 64 * MIB
    assert served.post().status_code == 200


def test_case_12_a_sender_that_waits_for_the_answer_gets_it(served: Served) -> None:
    with connect(served) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500000000\r\n\r\n")
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413") and str(8 * MIB).encode() in answer


def test_case_12_errors_are_small_and_echo_nothing(served: Served) -> None:
    secret = "s3cret" * 900_000
    for body in (
        {"messages": [{"role": "user", "content": None}] * 10_000},
        {"messages": [None] * 10_000},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": secret},
        {"messages": secret},
        {"messages": [{"role": "user", "content": "x"}], "stop": [5] * 10_000},
        {"messages": [{"role": "user", "content": "x"}], "tools": secret},
    ):
        assert "s3crets3cret" not in str(error_of(served.http.post("/v1/chat/completions", json=body), 400))
    assert served.post().status_code == 200


def test_case_12_slow_senders_are_cut_off_and_others_served(served: Served) -> None:
    """One sends its body byte by byte, one its header, one nothing at all."""
    body, header, silent = connect(served), connect(served), connect(served)
    body.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    began_s, answer = time.monotonic(), b""
    is_open = True
    while is_open and time.monotonic() - began_s < SETTINGS.body_timeout_s + 8:
        time.sleep(0.1)
        assert served.post().status_code == 200
        try:
            header.sendall(b"P")
            body.sendall(b" ")
            body.setblocking(False)
            answer += body.recv(1000)
            body.settimeout(10)
            is_open = not answer
        except BlockingIOError:
            body.settimeout(10)
        except OSError:
            header.close()
            header = connect(served)
    assert answer.startswith(b"HTTP/1.1 408")
    assert silent.recv(1000) == b""
    for connection in (body, header, silent):
        connection.close()


def test_case_12_streams_go_on_beside_them(served: Served) -> None:
    """A token every 10 ms. Client, server and engine share two cores and one interpreter here, so the bounds are wide;
    a body of 50 MB that was read or parsed in one go would take ten times the longest."""
    served.engine.script = lambda request: served.codec.encode("a") * 300
    served.engine.pause_s = 0.01
    quiet_s = LiveStream(served.url, prompt="a", max_tokens=100).join().gaps_s()
    bodies = [
        json.dumps({"messages": [None] * 10_000}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": "5" * 5_000_000}).encode(),
    ]
    stream = LiveStream(served.url, prompt="a", max_tokens=240).wait_begun()
    began_s, rounds = time.monotonic(), 0
    while len(stream.times_s) < 200:
        for chunked in (False, True):
            send_much(served, 50, chunked=chunked)
        for body in bodies:
            error_of(served.http.post("/v1/chat/completions", content=body), 400)
        rounds += 1
    gaps_s = stream.join().gaps_s(began_s)
    print(f"{rounds} rounds: median {median(gaps_s):.4f} s (quiet {median(quiet_s):.4f}), longest {max(gaps_s):.4f}")
    assert rounds >= 2
    assert median(gaps_s) < 2 * median(quiet_s)
    assert max(gaps_s) < 0.15
    served.engine.reset()
    served.say("fine")
