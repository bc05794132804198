"""Clients that leave, engines that die or stall, overload, shutdown: everyone is answered, nothing is left behind."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from bulletserve.core.errors import ConfigError
from bulletserve.core.request import Finished, FinishReason
from bulletserve.formats.description import Checkpoint
from bulletserve.server.serve import HttpServer
from bulletserve.transport.front_end import FrontEnd
from tests.server.conftest import SETTINGS, Served
from tests.server.sse import events
from tests.server.test_requests import error_of


def endless(served: Served) -> None:
    served.engine.script = lambda request: [served.codec.encode("a")[0]] * 10_000
    served.engine.pause_s = 0.005


def send(served: Served, head: bytes, body: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", served.server.port), timeout=10)
    connection.sendall(head + body)
    return connection


def request(body: dict[str, object], length: int | None = None) -> tuple[bytes, bytes]:
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (length or len(content))
    return head, content


def status_line(connection: socket.socket) -> bytes:
    with connection, connection.makefile("rb") as answer:
        return answer.readline()


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_forgotten_at_once(served: Served, stream: bool, held: bool) -> None:
    endless(served)
    served.engine.held = held
    before = served.server.open_requests.metrics.finished["abort"]
    prompts = ["a", "b", "c"]
    head, body = request({"prompt": prompts, "max_tokens": 200, "ignore_eos": True, "stream": stream})
    with send(served, head, body):
        served.wait_until(lambda: len(served.engine.running) == 3)
    served.wait_until(lambda: not served.engine.running)
    served.wait_until(lambda: len(served.server.open_requests) == 0)
    assert sorted(served.engine.aborted) == [r.id for r in served.engine.arrived]
    assert served.server.open_requests.metrics.finished["abort"] == before + 3


def test_many_clients_that_leave_in_the_middle_of_a_stream(served: Served) -> None:
    endless(served)
    head, body = request({"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True})
    for _ in range(5):
        connections = [send(served, head, body) for _ in range(8)]
        for connection in connections:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            connection.close()
        served.wait_until(lambda: not served.engine.running)
    assert len(served.server.open_requests) == 0
    assert served.server.open_requests._waiting == 0


def test_others_are_served_while_one_body_never_ends(served: Served) -> None:
    served.say("hello")
    head, body = request({"prompt": "a"}, length=100)
    half = send(served, head, body)
    headers_only = send(served, head[:20])
    assert served.post().status_code == 200
    assert b"408" in status_line(half)
    headers_only.close()


def test_a_body_that_ends_half_way_is_no_request(served: Served) -> None:
    head, body = request({"prompt": "a"}, length=100)
    send(served, head, body).close()
    assert served.http.get("/ping").status_code == 200
    assert served.engine.arrived == []


def test_a_large_body_is_refused_before_it_is_sent(served: Served) -> None:
    head, _ = request({}, length=10**9)
    assert b"413" in status_line(send(served, head))


def test_no_http_at_all(served: Served) -> None:
    assert b"400" in status_line(send(served, b"\x16\x03\x01\x00\xff hello\r\n\r\n"))
    assert served.http.get("/ping").status_code == 200


def test_the_engine_dies_in_the_middle_of_streams_and_answers(fresh: Served) -> None:
    endless(fresh)
    body = {"max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(fresh.post, **body)
        with fresh.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True, **body}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            fresh.wait_until(lambda: len(fresh.engine.running) == 2)
            fresh.engine.die("the device fell off")
            *_, last, _, done, _ = list(lines)
        error = error_of(answer.result(), 503)
    assert error["code"] == "engine_died"
    assert "the device fell off" in error["message"]
    assert json.loads(last.removeprefix("data: "))["error"] == error
    assert done == "data: [DONE]"

    refused = fresh.post()
    assert error_of(refused, 503)["code"] == "engine_died"
    assert refused.headers["retry-after"] == "1"
    assert "the device fell off" in error_of(fresh.http.get("/health"), 503)["message"]
    assert fresh.http.get("/v1/models").status_code == 200
    assert "bullet:num_requests_running" in fresh.http.get("/metrics").text


def test_a_killed_engine_is_told_by_whoever_watches_it(fresh: Served) -> None:
    endless(fresh)
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(fresh.post, max_tokens=200, ignore_eos=True)
        fresh.wait_until(lambda: bool(fresh.engine.running))
        fresh.engine.close()
        fresh.server.engine_died("exit code -9")
        fresh.server.engine_died("exit code -9")
        assert "exit code -9" in error_of(answer.result(), 503)["message"]


def test_a_new_engine_takes_over(fresh: Served) -> None:
    fresh.engine.die("once")
    fresh.wait_until(lambda: fresh.http.get("/health").status_code == 503)
    fresh.front_end, fresh.engine = fresh.new_engine()
    fresh.say("hello")
    fresh.server.engine_ready(fresh.front_end, fresh.front_end.wait_ready(10))
    fresh.wait_until(lambda: fresh.http.get("/health").status_code == 200)
    assert fresh.post().json()["choices"][0]["text"] == "hello"


def test_health_follows_what_the_engine_says(served: Served) -> None:
    assert served.http.get("/health").json() == {"status": "ok"}
    served.engine.silent = True
    served.wait_until(lambda: served.http.get("/health").status_code == 503)
    assert "said nothing" in error_of(served.http.get("/health"), 503)["message"]
    served.engine.silent = False
    served.wait_until(lambda: served.http.get("/health").status_code == 200)
    served.engine.oldest_step_s = 31.0
    served.wait_until(lambda: served.http.get("/health").status_code == 503)
    assert "a step" in error_of(served.http.get("/health"), 503)["message"]
    served.engine.oldest_step_s = 29.0
    served.wait_until(lambda: served.http.get("/health").status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "message"),
    [
        (Finished(0, FinishReason.REFUSED, None, "too late", 2.2), 429, "too late"),
        (Finished(0, FinishReason.REFUSED, None, "never fits"), 400, "never fits"),
        (Finished(0, FinishReason.ERROR, None, "step failed"), 500, "step failed"),
        (Finished(0, FinishReason.ABORT), 500, "stopped"),
    ],
)
def test_what_the_engine_refuses_has_its_own_status(
    served: Served, refusal: Finished, status: int, message: str, stream: bool
) -> None:
    served.engine.refusal = refusal
    response = served.post(prompt=["a", "b"], stream=stream)
    assert message in error_of(response, status)["message"]
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)
    served.engine.refusal = None
    served.wait_until(lambda: len(served.server.open_requests) == 0)


def test_more_than_may_wait_are_refused_at_once_and_the_rest_is_served(served: Served) -> None:
    served.say("hello")
    served.engine.held = True
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(served.post) for _ in range(SETTINGS.max_waiting)]
        served.wait_until(lambda: len(served.engine.running) == SETTINGS.max_waiting)
        for refused in (served.post(), served.chat(stream=True)):
            assert error_of(refused, 429)["code"] == "overloaded"
            assert int(refused.headers["retry-after"]) >= 1
        served.engine.held = False
        assert [answer.result().status_code for answer in waiting] == [200] * SETTINGS.max_waiting
    assert served.post().status_code == 200


def test_a_list_of_prompts_is_admitted_as_a_whole_or_not_at_all(served: Served) -> None:
    served.say("hello")
    served.engine.held = True
    assert error_of(served.post(prompt=["a"] * (SETTINGS.max_waiting + 1)), 400)["param"] == "prompt"
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(served.post, prompt=["a"] * 6)
        served.wait_until(lambda: len(served.engine.running) == 6)
        error_of(served.post(prompt=["a"] * 3), 429)
        assert len(served.engine.arrived) == 6
        served.engine.held = False
        assert len(waiting.result().json()["choices"]) == 6
    error_of(served.post(prompt=["fine", [5]]), 400)
    error_of(served.post(prompt=[[5], [10**6]]), 400)
    assert len(served.engine.arrived) == 6


def test_a_reader_that_is_slow_gets_everything(served: Served) -> None:
    served.engine.script = lambda request: served.codec.encode("ab") * 100
    with served.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 200, "stream": True}) as slow:
        time.sleep(0.3)
        response = httpx.Response(slow.status_code, headers=slow.headers, content=slow.read())
    assert len(events(response)) == 200


def test_shutdown_lets_answers_finish(fresh: Served) -> None:
    fresh.say("hello")
    fresh.engine.held = True
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(fresh.post)
        fresh.wait_until(lambda: bool(fresh.engine.running))
        fresh.server.shutdown(grace_s=20)
        fresh.wait_until(lambda: fresh.http.get("/health").status_code == 503)
        assert error_of(fresh.post(), 503)["code"] == "shutting_down"
        fresh.engine.held = False
        assert answer.result().json()["choices"][0]["text"] == "hello"


def test_shutdown_ends_what_does_not_finish(fresh: Served) -> None:
    endless(fresh)
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(fresh.post, **body)
        with fresh.http.stream("POST", "/v1/completions", json={"stream": True, **body}) as stream:
            lines = stream.iter_lines()
            next(lines)
            fresh.wait_until(lambda: len(fresh.engine.running) == 2)
            fresh.engine.pause_s = 1.0
            fresh.server.shutdown(grace_s=60)
            fresh.server.shutdown()  # said twice: now
            assert any("shutting_down" in line for line in lines)
        assert error_of(answer.result(), 503)["code"] == "shutting_down"
    fresh.wait_until(lambda: not fresh.thread.is_alive())


def test_shutdown_before_the_start(checkpoint: Checkpoint, served: Served) -> None:
    front_end, engine = served.new_engine()
    server = HttpServer(front_end, front_end.wait_ready(10), served.codec, SETTINGS)
    server.shutdown()
    thread = threading.Thread(target=server.run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    server.shutdown()
    engine.close()
    front_end.close()


def test_an_address_that_is_taken(served: Served) -> None:
    front_end = FrontEnd()
    settings = replace(SETTINGS, port=served.server.port)
    with pytest.raises(ConfigError, match="--port"):
        HttpServer(front_end, served.engine.info, served.codec, settings)
    front_end.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"served_names": ()},
        {"served_names": ("",)},
        {"api_keys": ("",)},
        {"port": 70_000},
        {"max_waiting": 0},
        {"grace_s": -1.0},
    ],
)
def test_settings_that_cannot_work(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(SETTINGS, **wrong)  # type: ignore[arg-type]
