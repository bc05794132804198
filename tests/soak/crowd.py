"""A crowd of clients for one server, some of them badly behaved: raw connections on one event loop.

Arrivals do not wait for answers. Each client is one connection; what became of it is counted by a word. A crowd that
behaves asks for the same as one that does not: a few shorter answers among many of one length cost a server more than
any abuse does, because requests that begin and end together, sixteen at once, are read and written together.
"""

import asyncio
import json
import random
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from bulletserve.core.garbage import frozen_garbage

ABUSES = ("vanished", "slow", "malformed")
"""Clients that leave before the end, that read at `SLOW_BYTES_S`, and that send what is no request."""

SHARE = 0.05
"""Of all clients, so many for each of `ABUSES`."""

SLOW_BYTES_S, SLOW_TOKENS = 100, 4
"""Slow readers ask for less, or the end of a run would be spent waiting for them: 4 tokens are ten seconds."""

FAST_BYTES_S = 1 << 20

BROKEN_BODIES = (
    b"{",
    b"[]",
    b'{"prompt": 5}',
    b'{"prompt": [99999999]}',
    b'{"prompt": "a", "max_tokens": -1}',
    b"\xff\xfe",
)
ENDED = (b"data: [DONE]\n\n", b'"error"')


@dataclass
class Tally:
    """What became of the requests of a crowd. `seconds`: until the last honest client had its answer; `health_s`: how
    long each look at /health took; `healthy`: it always was."""

    ends: Counter[str] = field(default_factory=Counter)
    health_s: list[float] = field(default_factory=list)
    healthy: bool = True
    seconds: float = 0.0

    @property
    def goodput(self) -> float:
        """Answers a second that somebody got to the end of, slow readers' too."""
        return (self.ends["honest 200"] + self.ends["slow 200"]) / self.seconds


class Crowd:
    """Clients that ask for `output_tokens` tokens, one in twenty for `SLOW_TOKENS`. The same ones come from the same
    `seed`; where the crowd is not `abusive`, all of them are honest."""

    def __init__(self, port: int, *, output_tokens: int, abusive: bool, seed: int = 0) -> None:
        self._port = port
        self._abusive = abusive
        self._draws = random.Random(seed)
        self._whims = random.Random(seed + 1)
        self._began_s = time.monotonic()
        self._body, self._short_body = (
            json.dumps({"prompt": [3, 5, 7] * 10, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
            for tokens in (output_tokens, SLOW_TOKENS)
        )
        self._tally = Tally()

    async def run(self, rate: float, seconds: float) -> Tally:
        """Arrivals at `rate` a second; ends when the last client has. Those that have ended are not kept, and what else
        this process holds is nothing for its collector: it would stop whoever times /health."""
        with frozen_garbage():
            return await self._run(rate, seconds)

    async def _run(self, rate: float, seconds: float) -> Tally:
        began_s = self._began_s = time.monotonic()
        over = threading.Event()
        looker = asyncio.create_task(asyncio.to_thread(self._look, over))
        clients: set[asyncio.Task[None]] = set()
        failed: list[BaseException] = []

        def ended(client: asyncio.Task[None]) -> None:
            clients.discard(client)
            if not client.cancelled() and (error := client.exception()):
                failed.append(error)

        sent = 0
        while (at_s := time.monotonic() - began_s) < seconds:
            while sent < at_s * rate:
                client = asyncio.create_task(self._client())
                client.add_done_callback(ended)
                clients.add(client)
                sent += 1
            await asyncio.sleep(0.005)
        await asyncio.wait_for(asyncio.gather(*clients), 180)
        if failed:
            raise failed[0]
        over.set()
        await looker
        return self._tally

    async def one_after_the_other(self, clients: int, seconds: float) -> Tally:
        """Honest clients that each send again as soon as they have their answer: what the server can do."""
        self._began_s = time.monotonic()

        async def keep_asking() -> None:
            while time.monotonic() - self._began_s < seconds:
                await self._client()

        await asyncio.gather(*(keep_asking() for _ in range(clients)))
        return self._tally

    async def _client(self) -> None:
        place = int(self._draws.random() / SHARE)
        abuse = ABUSES[place] if place < len(ABUSES) else None
        body = self._short_body if abuse == "slow" else self._body
        match abuse if self._abusive else None:
            case "vanished":
                self._tally.ends["vanished"] += 1
                await self._vanish(body)
            case "slow":
                self._tally.ends[f"slow {await self._ask(body, SLOW_BYTES_S)}"] += 1
            case "malformed":
                status = await self._ask(self._whims.choice(BROKEN_BODIES), FAST_BYTES_S)
                self._tally.ends[f"malformed {status}"] += 1
            case _:
                self._tally.ends[f"honest {await self._ask(body, FAST_BYTES_S)}"] += 1
                self._tally.seconds = time.monotonic() - self._began_s

    async def _open(self, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 12)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        writer.write(head + body)
        return reader, writer

    async def _ask(self, body: bytes, bytes_s: int) -> str:
        """The status of an answer, once all of it has come; `cut` where its end is missing."""
        reader, writer = await self._open(body)
        try:
            answer = await reader.readline()
            status = answer.split()[1].decode() if answer else "none"
            while data := await reader.read(min(bytes_s, 1 << 16)):
                answer = answer[-200:] + data
                if bytes_s == SLOW_BYTES_S:
                    await asyncio.sleep(1)
        except ConnectionError:
            return "reset"
        finally:
            writer.close()
        return status if any(end in answer for end in ENDED) or status != "200" else "cut"

    async def _vanish(self, body: bytes) -> None:
        reader, writer = await self._open(body)
        try:
            async with asyncio.timeout(self._whims.random()):
                await reader.read(500)
        except (TimeoutError, ConnectionError):
            pass
        writer.transport.abort()

    def _look(self, over: threading.Event) -> None:
        """On a thread of its own, so that it is the server that is looked at and not this crowd."""
        while not over.wait(0.1):
            began_s = time.monotonic()
            with socket.create_connection(("127.0.0.1", self._port), timeout=60) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                self._tally.healthy &= connection.recv(1000).startswith(b"HTTP/1.1 200 ")
            self._tally.health_s.append(time.monotonic() - began_s)
