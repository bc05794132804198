"""What the client of `bullet bench` costs per streamed token, beside the bare libraries it could be built on.

    python benchmarks/bench_client.py [--streams 64] [--rate 100] [--seconds 6]

A server process of this script sends every stream `--rate` events a second of the size that vLLM and we send. Processor
time of the client's process over the tokens it received. Each way runs twice, in turn; the better of the two counts,
because this is a cost and other programs only add to it. `ours`: aiohttp, uvloop, events decoded, token times, lag, the
whole of `client/replay`. The others only split events, decode them and note the time. Wanted: 64 streams at 100 tokens
a second on one core, with the client's loop at most 10 ms late at p99.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import httpx
import msgspec
import uvloop

from bulletserve.client.dialect import Dialect
from bulletserve.client.prompts import TimedPrompt
from bulletserve.client.replay import Run, replay
from bulletserve.client.server import Server
from record import record

EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1790000000,'
    b'"model":"meta-llama/Llama-3.1-8B","choices":[{"index":0,"text":" hello","logprobs":null,"finish_reason":null}],'
    b'"usage":null}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Way = Callable[[str, int, int], Coroutine[Any, Any, tuple[int, Run | None]]]


def serve(rate: float) -> None:
    """Answer every request with as many events as it asks for, `rate` a second; prints the port."""

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'"max_tokens":')
        tokens = int((await reader.readuntil(b",")).rstrip(b","))
        writer.write(HEAD)
        due_s = asyncio.get_running_loop().time()
        for _ in range(tokens):
            writer.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
            due_s += 1 / rate
            await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(stream, "127.0.0.1", 0, backlog=1000)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    uvloop.run(run())


class Choice(msgspec.Struct):
    text: str | None = None


class Event(msgspec.Struct):
    choices: list[Choice] | None = None


class Taker:
    """The least that any client does with what comes."""

    def __init__(self) -> None:
        self.kept = b""
        self.times_s: list[float] = []
        self._decoder = msgspec.json.Decoder(Event)

    def take(self, data: bytes) -> None:
        *events, self.kept = (self.kept + data).split(b"\n\n")
        now_s = time.monotonic()
        for event in events:
            if event != b"data: [DONE]":
                self._decoder.decode(event[6:])
                self.times_s.append(now_s)


async def ours(url: str, streams: int, tokens: int) -> tuple[int, Run | None]:
    prompts = [TimedPrompt(number, 0.0, [1, 2, 3], 3, tokens) for number in range(streams)]
    async with Server(f"{url}/v1") as server:
        run = await replay(server, Dialect("m"), prompts, float("inf"), asyncio.Event())
    return sum(len(one.answer.token_times_s) for one in run.outcomes), run


async def bare_aiohttp(url: str, streams: int, tokens: int) -> tuple[int, None]:
    takers, body = [Taker() for _ in range(streams)], Dialect("m").body([1, 2, 3], tokens)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(taker: Taker) -> None:
            async with session.post(url, data=body) as response:
                while data := await response.content.readany():
                    taker.take(data)

        await asyncio.gather(*map(one, takers))
    return sum(len(taker.times_s) for taker in takers), None


async def bare_httpx(url: str, streams: int, tokens: int) -> tuple[int, None]:
    takers, body = [Taker() for _ in range(streams)], Dialect("m").body([1, 2, 3], tokens)
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=None) as session:

        async def one(taker: Taker) -> None:
            async with session.stream("POST", url, content=body) as response:
                async for data in response.aiter_raw():
                    taker.take(data)

        await asyncio.gather(*map(one, takers))
    return sum(len(taker.times_s) for taker in takers), None


def main() -> None:
    """Run, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.rate)
        return
    command = [sys.executable, __file__, "--serve", "--rate", str(options.rate)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    ways: dict[str, tuple[Way, Callable[..., Any]]] = {
        "ours": (ours, uvloop.run),
        "aiohttp_uvloop": (bare_aiohttp, uvloop.run),
        "aiohttp_asyncio": (bare_aiohttp, asyncio.run),
        "httpx_uvloop": (bare_httpx, uvloop.run),
        "httpx_asyncio": (bare_httpx, asyncio.run),
    }
    metrics: dict[str, float] = {}
    try:
        for _ in range(2):
            for name, (way, runner) in ways.items():
                measure(name, way, runner, url, options, metrics)
    finally:
        server.terminate()
        server.wait()
    print("wrote", record("bench_client", metrics))


def measure(
    name: str, way: Way, runner: Callable[..., Any], url: str, options: argparse.Namespace, metrics: dict[str, float]
) -> None:
    """One run of one way; keeps the better of its runs."""
    began_s, processor_s = time.monotonic(), time.process_time()
    tokens, run = runner(way(url, options.streams, round(options.rate * options.seconds)))
    processor_s = time.process_time() - processor_s
    share, cost_us = processor_s / (time.monotonic() - began_s), processor_s / tokens * 1e6
    said = f"{name:16} {cost_us:6.1f} us of processor time a token, {share:.0%} of a core, {tokens} tokens"
    if cost_us < metrics.get(f"{name}_token_us", float("inf")):
        metrics |= {f"{name}_token_us": cost_us, f"{name}_core_share_x": share}
        if run is not None:
            metrics |= {"ours_loop_p99_ms": run.lag.loop_p99_s * 1e3, "ours_loop_max_ms": run.lag.loop_max_s * 1e3}
            said += f", loop late by {run.lag.loop_p99_s * 1e3:.1f} ms at p99"
    print(said, flush=True)


if __name__ == "__main__":
    main()
