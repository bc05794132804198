"""What the log and the traces say of a request, and what they never say."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from bulletserve.core.errors import ConfigError
from bulletserve.formats.description import Checkpoint
from bulletserve.server.request_facts import RequestFacts
from bulletserve.server.request_log import JsonLines, RequestLog
from bulletserve.server.tracing import Tracing
from tests.server.conftest import SETTINGS, Served

SECRET = "sk-very-secret"


@pytest.fixture
def told() -> list[RequestFacts]:
    return []


@pytest.fixture
def watched(checkpoint: Checkpoint, told: list[RequestFacts]) -> Iterator[Served]:
    settings = replace(SETTINGS, api_keys=(SECRET,))
    served = Served(checkpoint, settings, watchers=[RequestLog(every=True), told.append])
    served.http.headers["authorization"] = f"Bearer {SECRET}"
    served.say("hello")
    yield served
    served.close()


def last(told: list[RequestFacts], served: Served, count: int) -> RequestFacts:
    served.wait_until(lambda: len(told) == count)
    return told[-1]


def test_the_facts_of_an_answer(watched: Served, told: list[RequestFacts]) -> None:
    answer = watched.http.post(
        "/v1/completions", json={"prompt": ["hello", "a"], "stream": True}, headers={"x-request-id": "abc-1"}
    )
    assert '"id":"cmpl-abc-1"' in answer.text
    facts = last(told, watched, 1)
    assert (facts.request_id, facts.method, facts.path, facts.status) == ("abc-1", "POST", "/v1/completions", 200)
    assert facts.model == "small" and facts.finish == "stop" and facts.client == "127.0.0.1"
    assert (facts.prompt_tokens, facts.completion_tokens, facts.cached_tokens) == (2, 4, 2)
    first, second = (request.id for request in watched.engine.arrived)
    assert facts.engine_ids == (first, second)
    assert facts.first_token_s is not None and 0 < facts.first_token_s <= facts.seconds


def test_a_request_names_itself_in_its_body_unless_a_header_did(watched: Served, told: list[RequestFacts]) -> None:
    answer = watched.post(request_id="body-7")
    assert answer.headers["x-request-id"] == "body-7" and answer.json()["id"] == "cmpl-body-7"
    both = watched.http.post(
        "/v1/completions", json={"prompt": "a", "request_id": "body-7"}, headers={"x-request-id": "head-7"}
    )
    assert both.headers["x-request-id"] == "head-7" and both.json()["id"] == "cmpl-head-7"
    assert last(told, watched, 2).request_id == "head-7"
    for bad in ("", "a b", "x" * 129, "line\nbreak", "\u00e9"):
        assert watched.post(request_id=bad).json()["error"]["param"] == "request_id"


def test_who_leaves_and_who_is_refused(watched: Served, told: list[RequestFacts]) -> None:
    watched.http.get("/v1/models", headers={"authorization": "Bearer wrong"})
    assert last(told, watched, 1).status == 401
    watched.engine.held = True
    with pytest.raises(httpx.ReadTimeout):
        watched.http.post("/v1/completions", json={"prompt": "a"}, timeout=0.3)
    facts = last(told, watched, 2)
    assert (facts.status, facts.finish, facts.completion_tokens) == (0, "abort", 0)
    watched.engine.held = False


def test_a_watcher_that_fails_changes_no_answer(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    def fail(facts: RequestFacts) -> None:
        raise RuntimeError("the disk is full")

    served = Served(checkpoint, watchers=[fail])
    try:
        served.say("hello")
        assert served.post().status_code == 200
        served.wait_until(lambda: "the disk is full" in caplog.text)
    finally:
        served.close()


def test_no_key_and_no_text_is_in_any_log(watched: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    watched.post(prompt="my private diary")
    watched.http.post("/v1/completions", json={"prompt": "my private diary"}, headers={"authorization": "Bearer oops1"})
    watched.http.post("/v1/completions", content=b'{"prompt": "my private diary"', params={"key": SECRET})
    watched.wait_until(lambda: sum(record.name == "bulletserve.requests" for record in caplog.records) == 3)
    ours = [record for record in caplog.records if not record.name.startswith("http")]  # those are the client's
    lines = "\n".join(record.getMessage() + JsonLines().format(record) for record in ours)
    for secret in (SECRET, "diary", "oops1"):
        assert secret not in lines


def test_a_line_of_the_log_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = RequestLog(every=True)
    log(RequestFacts("id-1", True, "GET", "/a\nERROR forged\x1b[31m", status=404))
    (record,) = caplog.records
    assert "\n" not in record.getMessage() and "\x1b" not in record.getMessage()
    assert record.levelname == "INFO" and "id-1" in record.getMessage()
    fields = json.loads(JsonLines().format(record))
    assert fields["request_id"] == "id-1" and fields["status"] == 404 and fields["level"] == "info"
    assert "engine_ids" not in fields


@pytest.mark.parametrize(
    ("every", "status", "path", "level"),
    [
        (True, 200, "/v1/models", "INFO"),
        (True, 200, "/health", "DEBUG"),
        (True, 500, "/v1/completions", "WARNING"),
        (False, 500, "/v1/completions", "WARNING"),
        (False, 503, "/health", None),
        (False, 429, "/v1/completions", None),
        (False, 200, "/v1/completions", None),
    ],
)
def test_what_is_logged_and_how_loud(
    caplog: pytest.LogCaptureFixture, every: bool, status: int, path: str, level: str | None
) -> None:
    caplog.set_level(logging.DEBUG)
    RequestLog(every=every)(RequestFacts("id", False, "GET", path, status=status))
    assert [record.levelname for record in caplog.records] == ([level] if level else [])


def test_json_lines_carry_what_failed() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "it %s", ("failed",), (ValueError, error, None))
    fields = json.loads(JsonLines().format(record))
    assert fields["message"] == "it failed" and "ValueError: broken" in fields["error"]


def test_a_request_is_a_span_of_the_trace_it_came_with(checkpoint: Checkpoint) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    served = Served(checkpoint, watchers=[tracing])
    try:
        served.say("hello")
        trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        headers = {"traceparent": f"00-{trace}-{parent}-01", "x-request-id": "traced"}
        served.http.post("/v1/completions", json={"prompt": "hello"}, headers=headers)
        served.post(prompt="")  # a mistake is no work of the engine
        served.post(prompt="a")
        served.wait_until(lambda: len(exporter.get_finished_spans()) == 2)
    finally:
        served.close()
        tracing.close()
    span, other = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == trace and span.parent is not None
    assert f"{span.parent.span_id:016x}" == parent
    assert span.attributes is not None and span.attributes["gen_ai.request.id"] == "traced"
    assert span.attributes["gen_ai.usage.input_tokens"] == 1 and span.attributes["gen_ai.usage.output_tokens"] == 2
    assert span.start_time is not None and span.end_time is not None
    assert span.start_time <= span.events[0].timestamp <= span.end_time
    assert other.parent is None and f"{other.context.trace_id:032x}" != trace


def test_an_endpoint_that_is_none() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with pytest.raises(ConfigError, match="http://localhost:4318"):
        Tracing.to("localhost:4317")
    Tracing.to("http://localhost:4318/v1/traces").close()
