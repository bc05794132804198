"""Case 28: SIGTERM lets what is open finish, running or queued; when time is up it ends with an error, at once on the
second signal. The server as a user runs it, both processes."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

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


@contextmanager
def open_streams(served: Served, tokens: int) -> Iterator[list[HTTPConnection]]:
    """`STREAMS` streams that the server has taken in, 8 of which run."""
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True})
    address = served.url.removeprefix("http://")
    connections = [HTTPConnection(address, timeout=100) for _ in range(STREAMS)]
    try:
        for connection in connections:
            connection.request("POST", "/v1/completions", body)
        for _ in range(3):  # whoever came before this has been looked at
            assert served.http.get("/ping").status_code == 200
        yield connections
    finally:
        for connection in connections:
            connection.close()


def last_event(answer: HTTPResponse) -> dict[str, object]:
    """What a stream ends with before [DONE]; the whole answer where it never began."""
    text = answer.read().decode()
    if answer.status != 200:
        return dict(json.loads(text))
    *_, last, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return dict(json.loads(last.removeprefix("data: ")))


def test_case_28_none_is_lost_within_the_grace_time(tmp_path: Path) -> None:
    """8 run and 8 wait; newcomers are refused meanwhile."""
    with serving(tmp_path, 100) as served, open_streams(served, 500) as streams:
        served.process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + 10
        while served.http.get("/health").status_code != 503:
            assert time.monotonic() < deadline_s
        refused = served.http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        for stream in streams:
            (choice,) = last_event(stream.getresponse())["choices"]  # type: ignore[misc]
            assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("signals", [1, 2])
def test_case_28_when_time_is_up_streams_end_with_an_error(tmp_path: Path, signals: int) -> None:
    """No grace at all, or a long one that a second signal ends."""
    with serving(tmp_path, 0 if signals == 1 else 600) as served, open_streams(served, 2000) as streams:
        served.process.send_signal(signal.SIGTERM)
        if signals == 2:
            while served.http.get("/health").status_code != 503:
                time.sleep(0.01)
            served.process.send_signal(signal.SIGTERM)
        assert all("error" in last_event(stream.getresponse()) for stream in streams)
