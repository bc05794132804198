"""A server that behaves as a script says, well or badly: raw bytes over a real socket."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

Script = Callable[[asyncio.StreamWriter, dict[str, Any]], Awaitable[None]]

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def token(text: str = " a", finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]})


def usage(completion: int, prompt: int = 5) -> bytes:
    counted = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return event({"choices": [], "usage": counted})


def says(*parts: bytes, pause_s: float = 0.0) -> Script:
    """Write the parts, one after the other."""

    async def script(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return script


def status(code: int, body: bytes, kind: str = "application/json", more: str = "") -> Script:
    head = f"HTTP/1.1 {code} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    return says(head.encode() + body)


def answers(gap_s: float = 0.0) -> Script:
    """As many tokens as asked, one an event, and usage."""

    async def script(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        wanted = body["max_tokens"]
        writer.write(STREAM)
        for number in range(wanted):
            writer.write(token(finish="length" if number == wanted - 1 else None))
            await writer.drain()
            await asyncio.sleep(gap_s)
        writer.write(usage(wanted, len(body["prompt"])) + DONE)

    return script


class FakeServer:
    """`script(number, body)` chooses how request number `number` (from 0) is answered."""

    def __init__(self, script: Callable[[int, dict[str, Any]], Script]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.models = b'{"data": [{"id": "fake"}]}'
        self._script = script
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1000)
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._requests(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(v) for k, _, v in _fields(head) if k == "content-length"), 0)
            data = await reader.readexactly(length)
            if head.startswith("GET"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                writer.write(f"content-length: {len(self.models)}\r\n\r\n".encode() + self.models)
                await writer.drain()
                continue
            body = json.loads(data)
            number = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(head)
            await self._script(number, body)(writer, body)
            return


def _fields(head: str) -> list[tuple[str, str, str]]:
    return [line.lower().partition(": ") for line in head.split("\r\n")[1:] if line]
