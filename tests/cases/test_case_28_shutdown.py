"""Case 28: SIGTERM lets what is open finish, running or queued; when time is up it ends with an error, at once on the
second signal. The server as a user runs it, both processes."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.test_processes import Served

STREAMS = 16


@contextmanager
def serving(folder: Path, grace_s: float) -> Iterator[Served]:
    """8 requests run at once. Both processes must be gone in the end, with exit status 0."""
    served = Served(folder, "--max-num-seqs", "8", "--shutdown-timeout", str(grace_s))
    try:
        engine = served.engine_pid()
        yield served
        assert served.process.wait(30) == 0
        assert not Path(f"/proc/{engine}").exists()
    finally:
        served.close()


def stream(url: str, tokens: int, begun: threading.Semaphore) -> list[str]:
    body = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = []
        for line in answer.iter_lines():
            if not lines:
                begun.release()
            if line:
                lines.append(line)
    return lines


def open_streams(served: Served, pool: ThreadPoolExecutor, tokens: int, running: int) -> list[Future[list[str]]]:
    """`STREAMS` streams, of which `running` have begun."""
    begun = threading.Semaphore(0)
    streams = [pool.submit(stream, served.url, tokens, begun) for _ in range(STREAMS)]
    for _ in range(running):
        assert begun.acquire(timeout=30)
    return streams


def test_case_28_none_is_lost_within_the_grace_time(tmp_path: Path) -> None:
    """8 run and 8 wait; newcomers are refused meanwhile."""
    with serving(tmp_path, 100) as served, ThreadPoolExecutor(STREAMS) as pool:
        streams = open_streams(served, pool, 300, 8)
        served.process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + 10
        while served.http.get("/health").status_code != 503:
            assert time.monotonic() < deadline_s
        refused = served.http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        for one in streams:
            lines = one.result()
            assert lines[-1] == "data: [DONE]"
            assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("signals", [1, 2])
def test_case_28_when_time_is_up_streams_end_with_an_error(tmp_path: Path, signals: int) -> None:
    """No grace at all, or a long one that a second signal ends."""
    with serving(tmp_path, 0 if signals == 1 else 600) as served, ThreadPoolExecutor(STREAMS) as pool:
        streams = open_streams(served, pool, 2000, 8)
        for _ in range(signals):
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        for one in streams:
            lines = one.result()
            assert "error" in json.loads(lines[-1 if len(lines) == 1 else -2].removeprefix("data: "))
