"""Case 29: `/health` follows progress, and gauges fall without new traffic. Both processes, as a user runs them."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cases.scripted_server import serving
from tests.end_to_end.test_processes import Served
from tests.server.test_metrics import values
from tests.server.test_requests import error_of

SILENCE_S = 2.5
"""The engine speaks once a second."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("model"), "--health-timeout", str(SILENCE_S), "--max-num-seqs", "64")
    yield server
    server.close()


def wait_until(true: Callable[[], bool], limit_s: float = 20) -> None:
    deadline_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def gauges(served: Served) -> dict[str, float]:
    return values(served.http.get("/metrics").text)


def test_case_29_an_engine_that_stands_still_is_no_healthy_one(served: Served) -> None:
    engine = served.engine_pid()
    assert served.http.get("/health").status_code == 200
    os.kill(engine, signal.SIGSTOP)
    try:
        stopped_s = time.monotonic()
        wait_until(lambda: served.http.get("/health").status_code == 503)
        assert time.monotonic() - stopped_s >= SILENCE_S - 1.1
        assert "has said nothing" in error_of(served.http.get("/health"), 503)["message"]
        assert served.http.get("/ping").status_code == 200  # the front is there
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_until(lambda: served.http.get("/health").status_code == 200)
    answer = served.http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 2


def test_case_29_gauges_fall_to_zero_after_a_mass_abort(served: Served) -> None:
    before = gauges(served)["request_success_total:abort"]
    body = {"prompt": [1, 2, 3], "max_tokens": 1900, "ignore_eos": True}

    def ask(_: int) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/v1/completions", json=body, timeout=httpx.Timeout(20, read=1.5))

    with ThreadPoolExecutor(100) as pool:
        list(pool.map(ask, range(100)))
    wait_until(lambda: gauges(served)["request_success_total:abort"] == before + 100)
    wait_until(lambda: gauges(served)["num_requests_running"] == gauges(served)["num_requests_waiting"] == 0)
    wait_until(lambda: gauges(served)["kv_cache_usage_perc"] == 0)  # a step under way holds the blocks it writes to
    assert served.http.get("/health").status_code == 200


def test_case_29_a_policy_that_starts_nothing_is_seen_and_a_long_step_is_not(tmp_path: Path) -> None:
    with serving(tmp_path, status_limit_s=1.0, step_limit_s=30.0) as scripted:
        scripted.engine.oldest_step_s = 20.0  # a long prompt
        time.sleep(0.3)
        assert scripted.http.get("/health").status_code == 200
        scripted.engine.oldest_step_s, scripted.engine.standing_s = 0.0, 1.5
        scripted.wait_until(lambda: scripted.http.get("/health").status_code == 503)
        assert "started nothing" in error_of(scripted.http.get("/health"), 503)["message"]
        scripted.engine.standing_s = 0.0
        scripted.wait_until(lambda: scripted.http.get("/health").status_code == 200)
        scripted.engine.oldest_step_s = 31.0
        scripted.wait_until(lambda: scripted.http.get("/health").status_code == 503)
