"""Requests that nobody would send: no 500, no hang, nothing left behind."""

import gc
import http.client
import json
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulletserve.server.answering import Answering
from bulletserve.server.calls import Answer, Call
from bulletserve.server.protocol import ChatBody, CompletionBody
from tests.simulated_server import SimulatedServer
from tests.soak.length import SOAK_S

CLIENTS = 3
MOST_REQUESTS = 100_000
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2, "stop": ["x"], "stream": False, "seed": 5, "top_p": 0.9},
    "/v1/chat/completions": {
        "model": "small",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi \u00e9\U0001f600"}]}],
        "max_completion_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    },
}
SPLICES = (
    b"null",
    b"-1",
    b"1e999",
    b"[]",
    b"{}",
    b'"',
    b"\\ud800",
    b"\xff",
    b"\x00",
    b"true",
    b"9" * 30,
    b",",
    b"[" * 50,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedServer]:
    with SimulatedServer("static_split", tmp_path_factory.mktemp("fuzz")) as server:
        yield server


@pytest.fixture(autouse=True)
def leaves_nothing(server: SimulatedServer) -> Iterator[None]:
    """Afterwards nothing runs, every call is forgotten, and an honest request is answered."""
    yield
    server.wait_idle()
    deadline_s = time.monotonic() + 10
    while len(server.server.open_requests) or any(isinstance(o, (Call, Answer, Answering)) for o in gc.get_objects()):
        assert time.monotonic() < deadline_s, "something is kept"
        gc.collect()
        time.sleep(0.05)
    answer = server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3


def mutated(rng: random.Random, data: bytes) -> bytes:
    """One to three small damages."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, length = rng.randrange(len(data) + 1), rng.randint(1, 8)
        kind = rng.randrange(5)
        if kind == 0:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + length :]
        elif kind == 2:
            data = data[:at] + rng.choice(SPLICES) + data[at + rng.randint(0, 3) :]
        elif kind == 3:
            data = data[:at] + data[at : at + length] * rng.randint(2, 20) + data[at + length :]
        else:
            data = data[: rng.randint(at, len(data))]
    return data


def check(status: int, body: bytes, what: bytes) -> None:
    """An answer, or an error that is the request's fault and short."""
    assert status < 500, (status, body, what)
    if status >= 400:
        assert len(body) < 4000 and set(json.loads(body)) == {"error"}, (body, what)


def fuzz_bodies(port: int, seed: int, until_s: float) -> Counter[int]:
    """Damaged bodies one after the other on one connection; the statuses."""
    rng, statuses = random.Random(seed), Counter[int]()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {"content-type": "application/json"}
    while time.monotonic() < until_s and statuses.total() < MOST_REQUESTS // CLIENTS:
        path = rng.choice(list(GOOD))
        body = mutated(rng, json.dumps(GOOD[path], ensure_ascii=rng.random() < 0.5).encode())
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        check(answer.status, answer.read(), body)
        statuses[answer.status] += 1
    connection.close()
    return statuses


def test_damaged_bodies(server: SimulatedServer) -> None:
    """Every answer is a 200 or the client's own fault, and comes."""
    until_s = time.monotonic() + SOAK_S
    with ThreadPoolExecutor(CLIENTS) as pool:
        runs = [pool.submit(fuzz_bodies, server.server.port, seed, until_s) for seed in range(CLIENTS)]
        statuses = sum((run.result() for run in runs), Counter())
    print("damaged bodies:", dict(statuses))
    assert statuses.total() > 100 and statuses[200] and statuses[400]
    assert set(statuses) <= {200, 400, 404, 429}


def test_damaged_heads(server: SimulatedServer) -> None:
    """What is no HTTP gets an error or a closed connection, at once."""
    rng = random.Random(1)
    body = json.dumps(GOOD["/v1/completions"]).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    until_s = time.monotonic() + SOAK_S / 4
    count = 0
    while time.monotonic() < until_s:
        count += 1
        data = mutated(rng, head % len(body)) + body
        with socket.create_connection(("127.0.0.1", server.server.port), timeout=10) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)  # whatever was promised, no more comes
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
            except ConnectionError:
                continue
        if answer:
            assert answer.startswith(b"HTTP/1.1 "), (answer, data)
            status = int(answer.split()[1])
            assert status < 500 or status in (501, 505), (answer, data)
    assert count > 10


OTHERS = (
    "allowed_token_ids bad_words best_of chat_template echo frequency_penalty guided_json guided_regex "
    "include_stop_str_in_output logit_bias logprobs min_p min_tokens n presence_penalty prompt_logprobs "
    "repetition_penalty response_format spaces_between_special_tokens structured_outputs tool_choice tools "
    "top_logprobs truncate_prompt_tokens user nonsense"
)
FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, *OTHERS.split()})
SMALL = st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SMALL,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CHANGES = st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=4)


@settings(
    max_examples=max(20, int(25 * SOAK_S)),
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(path=st.sampled_from(sorted(GOOD)), changes=CHANGES)
def test_odd_fields(server: SimulatedServer, path: str, changes: dict[str, object]) -> None:
    """Good bodies with some of their fields replaced by anything that is JSON (and NaN, which is not)."""
    body = json.dumps(GOOD[path] | changes).encode()
    answer = server.http.post(path, content=body, headers={"content-type": "application/json"})
    check(answer.status_code, answer.content, body)


def test_requests_by_the_openapi_document(server: SimulatedServer, tmp_path: Path) -> None:
    """schemathesis, in a process of its own: what fits the document, what nearly does, and what does not."""
    if find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command: list[str | Path] = [Path(sys.executable).parent / "schemathesis", "run", f"{server.url}/openapi.json"]
    command += ["--checks", checks, "--phases", "coverage,fuzzing", "--request-timeout", "20", "--warnings", "off"]
    command += ["--max-examples", str(int(5 * SOAK_S)), "--max-time", str(int(SOAK_S) + 1), "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOAK_S + 120, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
