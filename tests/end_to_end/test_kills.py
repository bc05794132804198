"""A server that loses its engine or is told to end while it is full: `bullet serve` as users run it, two processes."""

import json
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.end_to_end.test_processes import Served

STREAMS = 32


def ask(served: Served, max_tokens: int, begun: threading.Semaphore) -> tuple[list[str], float]:
    """The lines of one streamed answer, and when the last of them came (monotonic)."""
    body = {"prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    with (
        httpx.Client(base_url=served.url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        if answer.status_code != 200:
            return [answer.read().decode()], time.monotonic()
        for line in answer.iter_lines():
            if line:
                lines.append(line)
                if len(lines) == 1:
                    begun.release()
    return lines, time.monotonic()


def begin(pool: ThreadPoolExecutor, served: Served, max_tokens: int) -> list[Future[tuple[list[str], float]]]:
    """`STREAMS` answers, each of which has begun."""
    begun = threading.Semaphore(0)
    streams = [pool.submit(ask, served, max_tokens, begun) for _ in range(STREAMS)]
    for _ in streams:
        assert begun.acquire(timeout=60)
    return streams


def test_every_stream_of_a_killed_engine_ends_with_an_error(tmp_path: Path) -> None:
    served = Served(tmp_path, "--max-num-seqs", str(STREAMS))
    try:
        with ThreadPoolExecutor(STREAMS) as pool:
            streams = begin(pool, served, 1900)
            os.kill(served.engine_pid(), signal.SIGKILL)
            killed_s = time.monotonic()
            answers = [stream.result(30) for stream in streams]
        for lines, ended_s in answers:
            assert ended_s - killed_s < 5
            assert lines[-1] == "data: [DONE]"
            error = json.loads(lines[-2].removeprefix("data: "))["error"]
            assert error["code"] == "engine_died" and error["type"] == "server_error"
    finally:
        served.close()


def test_sigterm_loses_nothing_that_ends_within_the_grace(tmp_path: Path) -> None:
    """32 streams and 32 requests behind them."""
    served = Served(tmp_path, "--max-num-seqs", str(STREAMS))
    tokens = 350  # two or three seconds: the engine says how many wait once a second
    try:
        with ThreadPoolExecutor(2 * STREAMS) as pool:
            streams = begin(pool, served, tokens)
            queued = [pool.submit(ask, served, 10, threading.Semaphore(0)) for _ in range(STREAMS)]
            deadline_s = time.monotonic() + 20
            while waiting(served) < STREAMS:
                assert time.monotonic() < deadline_s and not any(one.done() for one in streams)
                time.sleep(0.01)
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(30) == 0
            answers = [one.result(30)[0] for one in (*streams, *queued)]
        for number, lines in enumerate(answers):
            assert lines[-1] == "data: [DONE]", lines[-2:]
            events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
            assert events[-1]["choices"][0]["finish_reason"] == "length", number
    finally:
        served.close()


def waiting(served: Served) -> float:
    """As the engine says once a second."""
    lines = served.http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("bullet:num_requests_waiting{"))
