"""One request against servers that do well, and that misbehave in many ways: each failure has its word."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from bulletserve.client.dialect import Dialect
from bulletserve.client.outcome import Outcome
from bulletserve.client.prompts import TimedPrompt
from bulletserve.client.replay import find_dialect
from bulletserve.client.server import Server, base_url
from bulletserve.core.errors import ConfigError, ServerRefuses
from bulletserve.telemetry.latency import Answer
from tests.client.fake_server import CHUNKED, DONE, STREAM, FakeServer, Script, answers, says, status, token, usage

KEY = "sk-secret-0123"
DIALECT = Dialect("fake")


async def _ask(url: str, timeout_s: float) -> Outcome:
    outcome = Outcome(0, 4, Answer(time.monotonic(), 3), 0.0)
    async with Server(f"{url}/v1", KEY, timeout_s) as server:
        await server.ask(DIALECT.path, DIALECT.body([1, 2, 3], 4), outcome)
    return outcome


def ask(script: Script, timeout_s: float = 20.0) -> Outcome:
    with FakeServer(lambda number, body: script) as fake:
        return asyncio.run(_ask(fake.url, timeout_s))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def reset(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Close with RST."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def drip(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Say something again and again, and nothing that helps."""
    writer.write(STREAM)
    while True:
        writer.write(b": still here\n\n")
        await writer.drain()
        await asyncio.sleep(0.02)


async def flood(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """One event that never ends."""
    writer.write(STREAM + b"data: ")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def endless(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Tokens without end."""
    writer.write(STREAM)
    while True:
        writer.write(token() * 20)
        await writer.drain()


def one_byte_at_a_time(data: bytes) -> Script:
    return says(STREAM, *(data[at : at + 1] for at in range(len(data))))


WELL: dict[str, tuple[Script, int]] = {
    "plain": (answers(), 4),
    "chunked, kept alive": (says(CHUNKED, chunk(token() + token()[:9]), chunk(token()[9:] + DONE), b"0\r\n\r\n"), 2),
    "crlf": (says(STREAM, (token() + usage(1) + DONE).replace(b"\n", b"\r\n")), 1),
    "comments": (says(STREAM, b": ping\n\n", token(), b": ping\n\nretry: 5\n\n", DONE), 1),
    "byte by byte": (one_byte_at_a_time(token("é\u65e5") + token() + DONE), 2),
    "several tokens an event": (says(STREAM, token("a b c"), token("d", "length"), usage(4), DONE), 4),
    "no done": (says(STREAM, token(), token(finish="length")), 2),
    "done without finish": (says(STREAM, token(), DONE), 1),
    "usage beyond belief": (says(STREAM, token(), usage(10**15), DONE), 1),
    "cut after the end": (says(CHUNKED, chunk(token() + token(finish="length")), b"ff\r\nda"), 2),
    "noise after done": (says(STREAM, token(), DONE, b"\xff" * 1000), 1),
}


@pytest.mark.parametrize("name", WELL)
def test_an_answer_is_an_answer_however_it_is_told(name: str) -> None:
    script, tokens = WELL[name]
    outcome = ask(script)
    assert (outcome.kind, outcome.message) == ("ok", "")
    times = outcome.answer.token_times_s
    assert len(times) == tokens and times == sorted(times)
    assert outcome.answer.arrival_s <= outcome.sent_s <= times[0] <= times[-1] <= outcome.ended_s


BADLY: dict[str, tuple[Script, str, str]] = {
    "refused": (status(429, b'{"error": {"message": "queue is full"}}', more="retry-after: 3\r\n"), "http_429", "full"),
    "failed": (status(500, b"<html>oops</html>", "text/html"), "http_500", "oops"),
    "failed in other words": (status(503, b'{"detail": "warming up"}'), "http_503", "warming up"),
    "failed silently": (status(502, b""), "http_502", "without a word"),
    "redirected": (status(307, b"", more="location: http://127.0.0.1:9/\r\n"), "http_307", ""),
    "says the key": (status(401, f'{{"error": "wrong key {KEY}"}}'.encode()), "http_401", "wrong key ***"),
    "error far too long": (status(400, b"x" * 500_000), "http_400", "xxx"),
    "not a stream": (status(200, b'{"choices": [{"text": "hello"}]}'), "bad_stream", "application/json"),
    "a web page": (status(200, b"<html>hello</html>", "text/html"), "bad_stream", "text/html"),
    "garbage": (says(STREAM, token(), b"data: {oops\n\n", token()), "bad_stream", "oops"),
    "an error in the stream": (says(STREAM, token(), b'data: {"error": {"message": "boom"}}\n\n', DONE), "error_event",
                               "boom"),
    "aborted": (says(STREAM, token(), token(finish="abort"), DONE), "error_event", "abort"),
    "no token": (says(STREAM, usage(0), DONE), "empty", "no token"),
    "cut": (says(STREAM, token(), token()), "cut", "after 2 tokens"),
    "cut before a token": (says(STREAM), "cut", "after 0 tokens"),
    "cut in an event": (says(STREAM, token(), token()[:20]), "cut", "after 1 tokens"),
    "cut in a chunk": (says(CHUNKED, chunk(token()), b"ff\r\nda"), "cut", ""),
    "closed at once": (says(), "connect", ""),
    "reset": (reset, "connect", ""),
    "no HTTP": (says(b"SSH-2.0-OpenSSH_9.6\r\n"), "connect", ""),
    "endless headers": (says(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000 + b"\r\n\r\n"), "connect", ""),
    "zipped garbage": (says(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n"
                            b"connection: close\r\n\r\nnot gzip at all"), "connect", ""),
    "endless event": (flood, "bad_stream", "without end"),
    "endless tokens": (endless, "bad_stream", "does not end"),
}  # fmt: skip


@pytest.mark.parametrize("name", BADLY)
def test_every_failure_has_its_word(name: str) -> None:
    script, kind, message = BADLY[name]
    outcome = ask(script)
    assert outcome.kind == kind and message in outcome.message, outcome
    assert KEY not in outcome.message and len(outcome.message) <= 300 and "\n" not in outcome.message
    assert not outcome.answer.ended_well, "so that it meets no target"
    assert outcome.ended_s >= outcome.sent_s


SLOW = {"silent": says(), "drips": drip, "stalls": says(STREAM, token())}


@pytest.mark.parametrize("name", SLOW)
def test_an_answer_that_takes_too_long_is_a_timeout(name: str) -> None:
    async def silent(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        await SLOW[name](writer, body)
        await asyncio.sleep(30)

    outcome = ask(silent, timeout_s=0.4)
    assert outcome.kind == "timeout" and "0.4 s" in outcome.message


def test_a_server_that_holds_the_connection_open_after_the_end_does_not_hold_the_client() -> None:
    async def held(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        writer.write(STREAM + token() + DONE)
        await asyncio.sleep(30)

    before_s = time.monotonic()
    assert ask(held).ok
    assert time.monotonic() - before_s < 15


def test_nobody_there_is_a_failure_of_the_request() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        outcome = asyncio.run(_ask(f"http://127.0.0.1:{free.getsockname()[1]}", 5.0))
    assert outcome.kind == "connect" and "connect" in outcome.message.lower()


def test_the_key_travels_in_the_header_alone() -> None:
    with FakeServer(lambda number, body: answers()) as fake:
        assert asyncio.run(_ask(fake.url, 5.0)).ok
        assert f"Bearer {KEY}" in fake.headers[0]
        assert KEY not in json.dumps(fake.bodies)


def find(script: Callable[[int, dict[str, Any]], Script]) -> tuple[Dialect, list[dict[str, Any]]]:
    async def run(url: str) -> Dialect:
        async with Server(f"{url}/v1") as server:
            wanted = Dialect(await server.model(), extra={"top_p": 0.5})
            return await find_dialect(server, wanted, TimedPrompt(0, 0.0, [1, 2], 2, 9))

    with FakeServer(script) as fake:
        return asyncio.run(run(fake.url)), fake.bodies


def test_a_field_that_a_server_refuses_is_left_out_and_said() -> None:
    def strict(number: int, body: dict[str, Any]) -> Script:
        for name in ("stream_options", "ignore_eos"):
            if name in body:
                return status(422, json.dumps({"detail": [{"loc": ["body", name], "msg": "extra"}]}).encode())
        return answers()

    dialect, bodies = find(strict)
    assert dialect.model == "fake" and dialect.left_out == {"ignore_eos", "stream_options"}
    assert len(dialect.notes) == 2 and "ignore_eos" in dialect.notes[0]
    assert bodies[0]["ignore_eos"] is True and bodies[0]["stream_options"] == {"include_usage": True}
    assert bodies[-1] == {
        "model": "fake", "prompt": [1, 2], "max_tokens": 2, "temperature": 0, "stream": True, "top_p": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (status(400, b'{"error": {"message": "token 2 is outside the vocabulary"}}'), "outside the vocabulary"),
        (status(401, b'{"error": {"message": "no key"}}'), "no key"),
        (status(400, b'{"error": "ignore_eos, stream_options, and everything else is wrong"}'), "everything else"),
    ],
)
def test_a_server_that_refuses_what_all_requests_need_cannot_be_measured(script: Script, message: str) -> None:
    with pytest.raises(ServerRefuses, match=message):
        find(lambda number, body: script)


@pytest.mark.parametrize("models", [b"{}", b"[]", b"hello", b'{"data": []}', b'{"data": [{"id": '])
def test_a_server_that_tells_no_model_wants_it_named(models: bytes) -> None:
    async def run(url: str) -> str:
        async with Server(f"{url}/v1") as server:
            return await server.model()

    with FakeServer(lambda number, body: answers()) as fake:
        fake.models = models
        with pytest.raises(ServerRefuses, match="--model"):
            asyncio.run(run(fake.url))


def test_chat_has_another_path_and_messages() -> None:
    dialect = Dialect("m", chat=True)
    body = json.loads(dialect.body("hello", 3))
    assert dialect.path == "/chat/completions" and body["messages"] == [{"role": "user", "content": "hello"}]
    assert "prompt" not in body


def test_a_field_of_the_user_wins() -> None:
    assert json.loads(Dialect("m", extra={"ignore_eos": False, "temperature": 1}).body([1], 3))["temperature"] == 1


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("http://host/proxy/v1", "http://host/proxy/v1"),
        ("http://[::1]:80/", "http://[::1]:80/v1"),
    ],
)
def test_urls(text: str, url: str) -> None:
    assert base_url(text) == url


@pytest.mark.parametrize(
    "text",
    ["localhost:8000", "ftp://host", "http://", "http://host:port", "http://u:sekret@host", "http://h/?k=sekret"],
)
def test_what_is_no_url_or_tells_a_secret(text: str) -> None:
    with pytest.raises(ConfigError, match="--url") as caught:
        base_url(text)
    assert "sekret" not in str(caught.value)
