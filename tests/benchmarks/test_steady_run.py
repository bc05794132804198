"""The steady run when its server goes: it says so, ends its client, and leaves no file."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest


class Metrics(BaseHTTPRequestHandler):
    """Answers as a server's /metrics, and has `process` killed by the second question: the server goes."""

    process: subprocess.Popen[bytes]
    asked = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        self.wfile.write("".join(f'bullet:{name}{{model_name="m"}} 0.0\n' for name in names).encode())
        Metrics.asked += 1
        if Metrics.asked == 2:
            self.process.kill()
            self.process.wait()

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, str]]:
    """A process that stands for the server's, and the address that answers for it."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(Metrics, "process", process, raising=False)
    monkeypatch.setattr(Metrics, "asked", 0)
    with HTTPServer(("127.0.0.1", 0), Metrics) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield process.pid, f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()
    process.kill()
    process.wait()


def words(server: tuple[int, str], folder: Path, *, rate: float, minutes: float) -> list[str]:
    """The command line for a list of one request."""
    workload = folder / "azure-conv.jsonl"
    workload.write_text(json.dumps({"arrival": 0.0, "prompt_tokens": 5, "output_tokens": 5}) + "\n")
    given = ["--pid", str(server[0]), "--url", server[1], "--workload", str(workload)]
    return ["steady_run.py", *given, "--rate", str(rate), "--minutes", str(minutes)]


def test_a_server_that_goes_ends_the_run_with_a_word(
    server: tuple[int, str],
    script: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pid, _ = server
    module, started = script("steady_run"), []
    files = tmp_path / "files"
    files.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(files))
    monkeypatch.setattr(module, "EVERY_S", 0.02)
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda words: started.append(popen(words)) or started[-1])
    monkeypatch.setattr(sys, "argv", words(server, tmp_path, rate=1, minutes=0.1))
    assert module.main() == 1
    assert f"there is no process {pid}" in capsys.readouterr().err
    assert [client.poll() is not None for client in started] == [True]
    assert not list(files.iterdir())


def test_a_run_that_is_broken_off_tells_of_the_minutes_that_were_over(
    server: tuple[int, str],
    script: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Minutes of half a second; SIGTERM in the third, while an answer is being written down."""
    module = script("steady_run")
    monkeypatch.setattr(Metrics, "asked", 2)
    line = {"kind": "ok", "ttft_s": 0.1, "tpot_s": 0.01, "met": True, "token_times_s": [0.0, 0.01]}
    lines = [json.dumps({**line, "due_s": due_s}) for due_s in (0.1, 0.2, 0.6, 1.2)]

    @contextmanager
    def client(options: object, requests: Path, answers: Path, count: int) -> Iterator[object]:
        answers.write_text("\n".join(lines) + '\n{"kind": "o')
        Timer(1.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        yield SimpleNamespace(poll=lambda: None)

    for name, value in (("MINUTE_S", 0.5), ("ENDED_S", 0.0), ("SETTLE_S", 0.0), ("EVERY_S", 0.02), ("client", client)):
        monkeypatch.setattr(module, name, value)
    told: dict[str, float] = {}
    monkeypatch.setattr(module, "tell", lambda name, figures: told.update(figures))
    monkeypatch.setattr(sys, "argv", words(server, tmp_path, rate=9, minutes=8))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert module.main() == module.BROKEN_OFF
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told["minutes_n"] == 2 and told["all_requests_n"] == 3 and told["minute_2_requests_n"] == 1
    assert "2 of 8 minutes are told" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(script: Callable[[str], Any], unused_process: int, tmp_path: Path) -> None:
    module = script("steady_run")
    with pytest.raises(module.Gone, match=f"no process {unused_process}"):
        module.sample(unused_process, "http://127.0.0.1:9", 0.0)


@pytest.fixture
def unused_process() -> int:
    """The number of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid
