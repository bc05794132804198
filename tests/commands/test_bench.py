"""`bullet bench` from the command line to its files, against our own server and against one that misbehaves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from bulletserve import cli
from bulletserve.figures import RED
from tests.client.fake_server import STREAM, FakeServer, Script, answers, says, status, token
from tests.end_to_end.test_simulated_server import SimulatedServer

CALM = ["--max-lag-ms", "1e6"]  # this machine may be busy: whether the client kept up is not the question
SHORT = ["--prompt-tokens", "3-40", "--output-tokens", "2-12", "--token-ids", "50-250"]


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[SimulatedServer]:
    server = SimulatedServer("chunked_prefill", tmp_path)
    yield server
    server.close()


def bench(*words: object) -> int:
    return cli.main(["bench", *(str(word) for word in words)])


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def counter(server: SimulatedServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    found = re.search(rf"^bullet:{name}_total{{.*}} (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def test_our_server_is_measured_and_both_sides_count_alike(
    ours: SimulatedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl, document, report = tmp_path / "lines.jsonl", tmp_path / "out.json", tmp_path / "report"
    files = ["--jsonl", jsonl, "--json", document, "--report", report]
    words = ["--url", ours.url, *SHORT, "--requests", 30, "--rate", "60,90", "--ttft-slo-ms", 5000, *CALM, *files]
    assert bench(*words, "--label", "our own", "--send-slo") == 0
    shown = capsys.readouterr().out
    assert "our own: synthetic, poisson arrivals, targets TTFT 5000 ms" in shown
    assert "goodput is defined over 600 requests" in shown and "events, usage (60 answers)" in shown

    lines = lines_of(jsonl)
    assert len(lines) == 60 and {line["kind"] for line in lines} == {"ok"}
    assert all(line["output_tokens"] == line["asked_tokens"] == len(line["token_times_s"]) for line in lines)
    assert all(line["met"] and line["finish"] == "length" for line in lines)
    tokens = sum(line["output_tokens"] for line in lines)
    prompts = sum(line["prompt_tokens"] for line in lines)
    first = next(line for line in lines if line["number"] == 0)
    assert counter(ours, "generation_tokens") == tokens + 2, "and two of the request that tried the server out"
    assert counter(ours, "prompt_tokens") == prompts + first["prompt_tokens"]

    found = json.loads(document.read_text())
    assert found["name"] == "bench_synthetic" and found["server"]["model"] == "small" and found["complete"] is True
    assert {"command", "hardware", "versions", "commit", "date"} <= found.keys()
    assert found["metrics"]["synthetic_at_60_whole_answers_n"] == 30
    assert found["metrics"]["synthetic_at_90_met_x"] == 1.0
    ttft_ms = sorted(line["ttft_s"] * 1e3 for line in lines if line["rate"] == 60)
    assert found["metrics"]["synthetic_at_60_ttft_p50_ms"] == pytest.approx((ttft_ms[14] + ttft_ms[15]) / 2, abs=0.01)
    for name in ("latency", "gaps", "course", "attainment"):
        with Image.open(report / f"{name}.png") as picture:
            assert min(picture.size) > 300 and len(picture.convert("L").getcolors() or ()) > 20
        assert "<svg" in (report / f"{name}.svg").read_text()


def test_texts_go_to_chat_and_completions(ours: SimulatedServer, tmp_path: Path) -> None:
    talks = tmp_path / "talks.json"
    exchange = [{"from": "human", "value": "hello world"}, {"from": "gpt", "value": "x" * 20}]
    talks.write_text(json.dumps([{"conversations": exchange}] * 5))
    jsonl = tmp_path / "lines.jsonl"
    words = ["--url", ours.url, "--rate", "inf", "--jsonl", jsonl, *CALM]
    assert bench(*words, "--sharegpt", talks, "--endpoint", "chat") == 0
    assert [(line["asked_tokens"], line["output_tokens"], line["rate"]) for line in lines_of(jsonl)] == [
        (5, 5, "inf")
    ] * 5
    assert bench(*words, "--sharegpt", talks, "--output-tokens", 7) == 0
    assert {line["output_tokens"] for line in lines_of(jsonl)} == {7}
    assert bench(*words, "--prompts", "text", "--prompt-tokens", 4, "--output-tokens", 3, "--requests", 4) == 0
    assert len(lines_of(jsonl)) == 4


def test_a_list_keeps_its_own_arrivals(ours: SimulatedServer, tmp_path: Path) -> None:
    path, jsonl = tmp_path / "list.jsonl", tmp_path / "lines.jsonl"
    rows = [{"arrival": at, "prompt_tokens": 5, "output_tokens": 3} for at in (0.5, 1.0, 4.0, 9.0)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--url", ours.url, "--workload", path, "--token-ids", "50-250", "--jsonl", jsonl, *CALM]
    assert bench(*words, "--rate", 20, "--requests", 3) == 0
    assert sorted(line["due_s"] for line in lines_of(jsonl)) == [0.025, 0.05, 0.2]


def fake(script: Any) -> FakeServer:
    """The first request only tries the server out."""
    return FakeServer(lambda number, body: answers() if number == 0 else script(number, body))


def test_targets_and_more_fields_travel_in_every_body() -> None:
    with fake(lambda number, body: answers()) as server:
        words = ["--url", server.url, "--requests", 2, "--rate", "inf", "--prompt-tokens", 4, *CALM]
        assert bench(*words, "--tier", "tight", "--send-slo", "--extra-body", '{"return_token_ids": true}') == 0
        assert all(body["slo"] == {"ttft_ms": 300, "tpot_ms": 8} for body in server.bodies)
        assert all(body["return_token_ids"] is True for body in server.bodies)


def test_failures_are_counted_and_end_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scripts: list[Script] = [status(429, b'{"error": {"message": "full"}}'), says(STREAM, token()), says(), answers()]
    jsonl, document = tmp_path / "lines.jsonl", tmp_path / "out.json"
    with fake(lambda number, body: scripts[number % 4]) as server:
        words = ["--url", server.url, "--requests", 20, "--rate", 200, "--jsonl", jsonl, "--json", document, *CALM]
        assert bench(*words, "--prompt-tokens", 4, "--output-tokens", 3, "--report", tmp_path) == 5
    shown = capsys.readouterr().out
    assert "10 of 20 requests were broken off or found no connection" in shown and "it answers now" in shown
    assert "5 x http_429, such as: full" in shown and "5 x cut" in shown and "5 x connect" in shown
    metrics = json.loads(document.read_text())["metrics"]
    assert (metrics["synthetic_at_200_http_429_n"], metrics["synthetic_at_200_whole_answers_n"]) == (5, 5)
    assert metrics["synthetic_at_200_met_x"] == 0.25, "a failure meets no target"
    assert len(lines_of(jsonl)) == 20
    drawn = (tmp_path / "course.svg").read_text()
    assert "15 failed (ticks)" in drawn and RED.lower() in drawn


def test_refusals_alone_are_a_measurement() -> None:
    with fake(lambda number, body: status(429, b"{}") if number % 2 else answers()) as server:
        words = ["--url", server.url, "--requests", 20, "--rate", 200, *CALM]
        assert bench(*words, "--prompt-tokens", 4, "--output-tokens", 3) == 0


def test_a_server_that_dies_in_the_middle_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six streams are cut with it, and whoever comes after them finds no connection; no other rate is tried."""
    code = (
        "import os, sys\nfrom tests.client.fake_server import FakeServer, answers, says\n"
        "async def die(writer, body):\n    os._exit(1)\n"
        "server = FakeServer(lambda number, body: answers(30.0) if 10 <= number < 16 else die if number == 16 "
        "else answers())\nprint(server.url, flush=True)\nsys.stdin.read()\n"
    )
    document = tmp_path / "out.json"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    words = ["--url", process.stdout.readline().strip(), "--requests", 20, "--rate", "50,60", "--arrivals", "even"]
    try:
        assert bench(*words, "--prompt-tokens", 4, "--output-tokens", 3, "--json", document, *CALM) == 5
    finally:
        process.kill()
        process.communicate()
    shown = capsys.readouterr().out
    assert "6 x cut" in shown and "THE SERVER DIED" in shown and "11 of 20 requests were broken off" in shown
    found = json.loads(document.read_text())
    assert found["complete"] is False and "at 60" not in shown
    assert any("THE SERVER DIED" in note for note in found["notes"])


def test_no_answer_at_all_has_a_status_of_its_own(tmp_path: Path) -> None:
    with fake(lambda number, body: status(500, b"")) as server:
        words = ["--url", server.url, "--requests", 5, "--rate", "inf", *CALM, "--report", tmp_path]
        assert bench(*words, "--prompt-tokens", 4) == 4
    assert (tmp_path / "course.png").exists() and not (tmp_path / "latency.png").exists()


def test_a_client_that_did_not_keep_up_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = tmp_path / "out.json"
    with fake(lambda number, body: answers()) as server:
        words = ["--url", server.url, "--requests", 5, "--rate", 100, "--prompt-tokens", 4, "--json", document]
        assert bench(*words, "--output-tokens", 3, "--max-lag-ms", 1e-6) == 3
    assert "THE CLIENT DID NOT KEEP UP" in capsys.readouterr().out
    assert json.loads(document.read_text())["kept_up"] is False


def test_the_key_is_in_no_file_and_on_no_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-very-secret"
    jsonl, document, key_file = tmp_path / "lines.jsonl", tmp_path / "out.json", tmp_path / "key"
    key_file.write_text(key + "\n")
    monkeypatch.setenv("SOME_KEY", key)
    leak = status(401, f"the key {key} is wrong".encode(), "text/plain")
    with fake(lambda number, body: leak if number in (1, 3) else answers()) as server:
        words = ["--url", server.url, "--requests", 4, "--rate", "inf", "--prompt-tokens", 4, *CALM]
        assert bench(*words, "--jsonl", jsonl, "--json", document, "--api-key-env", "SOME_KEY") == 0
        assert f"authorization: bearer {key}" in server.headers[-1].lower()
        written = jsonl.read_text() + document.read_text() + "".join(capsys.readouterr())
        assert key not in written and "the key *** is wrong" in written
        assert bench(*words, "--api-key-file", key_file) == 0
        assert f"authorization: bearer {key}" in server.headers[-1].lower()
        assert bench(*words) == 0 and "authorization" not in server.headers[-1].lower()


def test_no_run_is_helped_by_what_a_server_remembers_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda number, body: answers()) as server:
        words = ["--url", server.url, "--requests", 2, "--rate", "100,200", "--prompt-tokens", 20, *CALM]
        assert bench(*words) == 0 and bench(*words) == 0
        asked = [tuple(body["prompt"][:5]) for body in server.bodies]
        assert len(asked) == 10 and len(set(asked)) == 10
        assert bench(*words, "--same-prompts") == 0
        asked = [tuple(body["prompt"]) for body in server.bodies[10:]]
        assert len(asked) == 5 and len(set(asked)) == 2
    *different, same = capsys.readouterr().out.split("requests (made up")
    assert "prefix cache" in same and not any("prefix cache" in text for text in different)


def test_a_mooncake_trace_shares_prefixes_at_its_own_pace(tmp_path: Path) -> None:
    trace, jsonl = tmp_path / "mooncake.jsonl", tmp_path / "lines.jsonl"
    rows = [(0, 600, [1, 2]), (200, 1100, [1, 2, 3]), (400, 512, [9])]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": ms, "input_length": n, "output_length": 2, "hash_ids": ids}) + "\n"
            for ms, n, ids in rows
        )
    )
    with fake(lambda number, body: answers()) as server:
        assert bench("--url", server.url, "--trace", trace, "--jsonl", jsonl, *CALM) == 0
        _, one, other, third = (body["prompt"] for body in server.bodies)
    assert one == other[:600] and len(third) == 512 and third[:100] != one[:100]
    assert [line["due_s"] for line in lines_of(jsonl)] == [0.0, 0.2, 0.4]


def test_ctrl_c_writes_what_there_is(tmp_path: Path) -> None:
    jsonl, document = tmp_path / "lines.jsonl", tmp_path / "out.json"
    code = "import sys; from bulletserve.cli import main; sys.exit(main())"
    with fake(lambda number, body: answers(0.01 if number < 6 else 30.0)) as server:
        words = ["--url", server.url, "--requests", "50", "--rate", "20,30", "--prompt-tokens", "4"]
        words += ["--output-tokens", "3", "--arrivals", "even", "--jsonl", str(jsonl), "--json", str(document), *CALM]
        command = [sys.executable, "-c", code, "bench", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        deadline_s = time.monotonic() + 60
        while len(server.bodies) < 8 or len(jsonl.read_text().splitlines()) < 5:
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    kinds = [line["kind"] for line in lines_of(jsonl)]
    assert kinds.count("ok") == 5 and "interrupted" in kinds and len(kinds) < 50
    assert "stopped before" in shown and "Traceback" not in errors
    found = json.loads(document.read_text())
    assert found["complete"] is False and found["metrics"]["synthetic_at_20_whole_answers_n"] == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "1", "--url", "localhost:1"], "no URL"),
        (["--rate", "1", "--url", "http://127.0.0.1:9"], "no server answers"),
        (["--rate", "1", "--model", "m", "--url", "http://127.0.0.1:9"], "does not answer the request"),
        ([], "name a --rate"),
        (["--rate", "1", "--timeout-s", "0"], "must be above 0"),
        (["--rate", "1", "--api-key-env", "NO_SUCH_VARIABLE_HERE"], "is not set"),
        (["--rate", "1", "--api-key-file", "/nowhere/key"], "No such file"),
        (["--rate", "1", "--tier", "tight", "--tpot-slo-ms", "5"], "leave --ttft-slo-ms"),
        (["--rate", "1", "--send-slo"], "no targets to send"),
        (["--rate", "1", "--tpot-slo-ms", "-5"], "must be a number of milliseconds"),
        (["--rate", "1", "--workload", "none"], "no workload"),
        (["--rate", "1", "--workload", "azure-code", "--prompt-tokens", "5"], "lengths of its own"),
        (["--rate", "1", "--arrivals", "recorded"], "tells no times"),
        (["--rate", "1", "--arrivals", "often"], "gamma:CV"),
        (["--rate", "1", "--prompt-tokens", "few"], "a length is"),
        (["--rate", "1", "--trace", "/nowhere/trace"], "cannot be read"),
        (["--rate", "1", "--sharegpt", "/nowhere/talks"], "cannot be read"),
        (["--rate", "1", "--json", "/nowhere/x.json"], "can be written to"),
        (["--rate", "1", "--endpoint", "chat", "--token-ids", "5-9"], "texts only"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*words) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--rate", "0"], ["--rate", "5,5"], ["--rate", "fast"], ["--token-ids", "9-3"], ["--extra-body", "[1]"],
     ["--extra-body", "{"], ["--workload", "azure-code", "--trace", "x"]],
)  # fmt: skip
def test_what_no_option_can_be_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench(*words)
    assert "usage" in capsys.readouterr().err
