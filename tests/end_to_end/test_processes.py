"""`bullet serve` as a user runs it: two processes, signals, and an engine that is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from bulletserve.telemetry.record_format import Record

BULLET = Path(sys.executable).parent / "bullet"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


class Served:
    def __init__(self, folder: Path, *flags: str) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        command = [BULLET, "serve", folder / "config.json", "--load-format", "dummy", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = ""
        for line in self.process.stdout:
            if line.startswith("ready: "):
                self.url = line.split()[1].rstrip(",").removesuffix("/v1")
                break
        assert self.url, self.process.communicate()[1]
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def engine_pid(self) -> int:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        children = [child for task in tasks for child in (task / "children").read_text().split()]
        return next(int(c) for c in children if "engine_process" in Path(f"/proc/{c}/cmdline").read_text())

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path)
    yield server
    server.close()


def long_stream(served: Served):
    body = {"prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    return served.http.stream("POST", "/v1/completions", json=body)


def test_a_killed_engine_is_an_error_for_clients_and_is_started_again_once(served: Served) -> None:
    first = served.engine_pid()
    with long_stream(served) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(first, signal.SIGKILL)
        killed_s = time.monotonic()
        rest = list(lines)
    assert time.monotonic() - killed_s < 5
    errors = [line for line in rest if '"error"' in line]
    assert errors and "engine died" in errors[0]
    assert served.http.get("/health").status_code == 503

    deadline_s = time.monotonic() + 60
    while served.http.get("/health").status_code != 200:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    answer = served.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 4

    os.kill(served.engine_pid(), signal.SIGKILL)
    assert served.process.wait(30) == 70


def socket_folders(pid: int) -> set[Path]:
    """Where a process listens on Unix sockets."""
    own = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            own.add(str(each.readlink()))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {Path(row[7]).parent for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in own}


def test_sigterm_ends_both_processes_in_order(tmp_path: Path) -> None:
    served = Served(tmp_path)
    engine = served.engine_pid()
    folders = socket_folders(served.process.pid)
    assert [folder.name.startswith("bullet-") for folder in folders] == [True]
    with long_stream(served) as stream:
        lines = stream.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        text = "\n".join(lines)
    assert "shutting down" in text or "[DONE]" in text
    assert served.process.wait(30) == 0
    assert not Path(f"/proc/{engine}").exists()
    assert not any(folder.exists() for folder in folders)
    served.close()


def test_sigterm_to_the_whole_group_lets_streams_finish(tmp_path: Path) -> None:
    served = Served(tmp_path)
    body = {"prompt": [1, 2, 3], "max_tokens": 300, "ignore_eos": True, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(served.engine_pid(), signal.SIGTERM)
        served.process.send_signal(signal.SIGTERM)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert served.process.wait(30) == 0
    served.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_server_whose_words_cannot_be_written_serves(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [BULLET, "serve", tmp_path / "config.json", "--load-format", "dummy", "--port", str(port)]
    with Path("/dev/full").open("w") as full, subprocess.Popen(command, stdout=full) as process:
        deadline_s = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline_s:
            try:
                assert httpx.get(f"http://127.0.0.1:{port}/version").status_code == 200
                break
            except httpx.TransportError:
                time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_sigterm_while_loading_ends_at_once(tmp_path: Path) -> None:
    process = subprocess.Popen([BULLET, "serve", "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("loading")
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    process.stdout.close()


def test_the_engine_does_not_outlive_a_killed_front(served: Served) -> None:
    engine = served.engine_pid()
    served.process.kill()
    deadline_s = time.monotonic() + 30
    while Path(f"/proc/{engine}").exists() and "zombie" not in Path(f"/proc/{engine}/status").read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_what_cannot_work_is_one_line_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    cases = {
        ("nothing.gguf",): "no such file",
        (str(tmp_path / "config.json"),): "--load-format dummy",
        ("--device", "cuda"): "--device cpu",
        ("--policy", "magic"): "static_split",
        ("--policy", "chunked_prefill:budget=x"): "type int",
        ("--max-model-len", "9999999"): "at most",
        (str(tmp_path / "config.json"), "--load-format", "dummy", "--num-gpu-blocks-override", "4", "--max-model-len")
        + ("2000",): "at most 64",
        ("--served-model-name", ""): "--served-model-name",
        ("--enable-auto-tool-choice",): "--tool-call-parser",
        ("--tool-call-parser", "hermes"): "--enable-auto-tool-choice",
    }

    def serve(flags: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        words = [BULLET, "serve", "--port", "0", *flags]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(serve, cases))
    for (flags, fix), run in zip(cases.items(), runs, strict=True):
        assert run.returncode in (1, 2), flags
        assert fix in run.stderr, (flags, run.stderr)
        assert "Traceback" not in run.stderr
        assert len(run.stderr.strip().splitlines()) == 1, run.stderr


def test_an_unknown_flag_is_refused() -> None:
    run = subprocess.run([BULLET, "serve", "--warp-speed"], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "--warp-speed" in run.stderr


def test_a_recorded_server_is_decided_again_without_a_difference(tmp_path: Path) -> None:
    """Prefix hits, aborts and many streams included; the record ends when the server does."""
    path = tmp_path / "run"
    served = Served(tmp_path, "--record", str(path), "--num-gpu-blocks-override", "150", "--max-num-seqs", "4")
    try:
        with long_stream(served) as stream:
            next(stream.iter_lines())
        body = {"prompt": [list(range(3, 60)), list(range(3, 90)), [7] * 40] * 3, "max_tokens": 30, "ignore_eos": True}
        for _ in range(2):
            assert served.http.post("/v1/completions", json=body).status_code == 200
        choice = {"prompt": [5] * 20, "guided_choice": ["yes", "no"]}
        assert served.http.post("/v1/completions", json=choice).json()["choices"][0]["text"] in ("yes", "no")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0
    finally:
        served.close()
    done = subprocess.run([BULLET, "replay", path], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 differences" in done.stdout and "no end" not in done.stdout
    with Record(path) as record:
        turns = list(record.turns())
    assert record.header["config"]["policy"] == "static_split" and record.header["version"]
    kinds = {type(event).__name__ for turn in turns for event in turn.events}
    assert {"Arrived", "Aborted", "StepDone", "Masked"} <= kinds
    assert any(plan.admit for turn in turns for plan in turn.plans)


def test_nothing_is_recorded_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "run").write_text("precious")
    for name, words in (("run", "name a new file"), ("none/run", "no folder")):
        command = [BULLET, "serve", tmp_path / "config.json", "--load-format", "dummy", "--record", tmp_path / name]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and words in done.stderr
    assert (tmp_path / "run").read_text() == "precious"
