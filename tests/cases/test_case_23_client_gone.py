"""Case 23: the client is gone, the request still runs and holds KV."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.simulated_server import LIMITS, SimulatedServer

LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def server(simulated: SimulatedServer) -> Iterator[SimulatedServer]:
    simulated.wait_idle()
    yield simulated
    simulated.wait_idle()


def send(server: SimulatedServer, **body: object) -> socket.socket:
    content = json.dumps({"prompt": "abc", **LONG, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", server.server.port), timeout=10)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content))
    connection.sendall(content)
    return connection


def all_is_over(server: SimulatedServer) -> None:
    """Within moments nothing runs, waits or holds a block, and the gauges say so without new traffic."""
    server.wait_idle(3.0)
    assert server.engine.state.ledger.used_blocks == 0
    wanted = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline_s = time.monotonic() + 5
    while True:
        lines = server.http.get("/metrics").text.splitlines()
        values = [line.split()[-1] for line in lines if line.startswith(tuple(f"bullet:{name}{{" for name in wanted))]
        assert len(values) == len(wanted)
        if set(values) == {"0.0"}:
            return
        assert time.monotonic() < deadline_s, values
        time.sleep(0.02)


def running(server: SimulatedServer, count: int) -> None:
    deadline_s = time.monotonic() + 10
    while len(server.server.open_requests) < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_case_23_in_a_stream(server: SimulatedServer) -> None:
    with send(server, stream=True) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    all_is_over(server)


@pytest.mark.parametrize("body", [{}, {"prompt": ["ab", "cd", "ef", "gh"]}, {"n": 4}])
@pytest.mark.parametrize("stream", [False, True])
def test_case_23_in_calls_of_one_answer_and_of_four(
    server: SimulatedServer, body: dict[str, object], stream: bool
) -> None:
    with send(server, stream=stream, **body):
        running(server, 4 if body else 1)
    all_is_over(server)


def test_case_23_while_it_waits(server: SimulatedServer) -> None:
    with ExitStack() as clients:
        for _ in range(LIMITS.max_seqs + 8):
            clients.enter_context(send(server, stream=True))
        running(server, LIMITS.max_seqs + 8)
    all_is_over(server)


def test_case_23_two_hundred_at_once(server: SimulatedServer) -> None:
    with ExitStack() as clients:
        for number in range(200):
            clients.enter_context(send(server, stream=number % 2 == 0))
        running(server, 100)  # the first may have had their whole answer
    all_is_over(server)


def test_case_23_fifty_rounds_leave_nothing(server: SimulatedServer) -> None:
    for number in range(50):
        with send(server, stream=number % 2 == 0, prompt="abcdefgh" * (1 + number % 9)) as connection:
            connection.settimeout(10)
            if number % 2 == 0:
                connection.recv(100)
    all_is_over(server)
    answer = server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3}).json()
    assert answer["usage"]["completion_tokens"] == 3
