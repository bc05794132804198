"""What our HTTP front costs: processor time per token, what it adds to gaps, what a long prompt does to others.

    python benchmarks/server_overhead.py [--streams 64] [--rate 100] [--seconds 8] [--repeats 3]

Three processes on this machine, as in use: the front of `bullet serve`, an engine whose device is arithmetic (a decode
step takes 1 / `--rate` seconds whatever is in it, prefill next to nothing) and this client, which only splits bytes and
notes times. Figures: the front's processor time (user and system) over the tokens it streamed; p99 of the client's gaps
less p99 of the gaps between the engine's messages; the longest gap of the streams while a text of 200,000 tokens is
posted, beside the longest without it. Wanted: 35 us a token, 2 ms.
`front_us` and `added_gap_p99_ms` are the best of the repeats, for whatever else the machine does only adds to them. The
tokenizer is that of the packaged SmolLM2.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bulletserve.core.events import Event, StepDone
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import Plan
from bulletserve.core.snapshot import Limits
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.server.text_codec import TextCodec
from bulletserve.simulator.truth import Uncapped
from bulletserve.telemetry.latency import quantile
from record import record

CONTEXT_TOKENS = 262_144
LONG_PROMPT_TOKENS = 200_000
LIMITS = Limits(32, 16, 100_000, 256, 1 << 24, 1 << 18, Lattice.of_splits(132, (Partition(100, 32),)))
SETTLING_S = 0.3
"""From the last stream's first token to the first gap that counts: 64 requests at one moment are another matter."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class SteadyTruth(Uncapped):
    """Every decode step takes the same time, prefill nearly none and from nobody."""

    total_sms = 132

    def __init__(self, decode_s: float) -> None:
        self._decode_s = decode_s

    def alone_s(self, step: StepShape, sms: int) -> float:
        return self._decode_s if step.decode_rows else 1e-4

    def beside_s(self, step: StepShape, sms: int, other: StepShape, other_sms: int) -> float:
        return self.alone_s(step, sms)


def engine(to_engine: str, to_front: str, rate: float) -> None:
    """The engine's process; prints, at its end, when it told of each decode step (s of the monotonic clock)."""
    from bulletserve.simulated_engine import SimulatedEngine
    from bulletserve.transport.addresses import Addresses

    codec = TextCodec.from_checkpoint(open_checkpoint(None))
    words = [codec.encode(word)[0] for word in (" the", " house", " \u00e9t\u00e9", "\n", '"', " of", " never", ",")]
    told_s: list[float] = []

    def observe(now_s: float, events: Sequence[Event], plans: Sequence[Plan]) -> None:
        told_s.extend(now_s for event in events if isinstance(event, StepDone) and len(event.tokens) > 1)

    made = SimulatedEngine(
        Addresses(to_engine, to_front),
        "static_split",
        LIMITS,
        SteadyTruth(1 / rate),
        None,
        lambda request_id, position: words[(request_id + position) % len(words)],
        vocab_size=codec.vocab_size,
        max_model_len=CONTEXT_TOKENS,
        observer=observe,
    )
    made.join()
    print(json.dumps(told_s), flush=True)


def front(rate: float) -> None:
    """The front: starts the engine, tells the port, serves until its input ends, tells the engine's words."""
    import threading

    from bulletserve.server.serve import HttpServer
    from bulletserve.server.settings import ServerSettings
    from bulletserve.transport.front_end import FrontEnd

    end = FrontEnd()
    addresses = end.addresses
    command = [sys.executable, __file__, "--engine", addresses.to_engine, addresses.to_front, "--rate", str(rate)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    info = end.wait_ready(60, lambda: process.poll() is None)
    codec = TextCodec.from_checkpoint(open_checkpoint(None))
    server = HttpServer(end, info, codec, ServerSettings(("steady",), port=0))

    def watch() -> None:
        sys.stdin.read()
        server.shutdown()

    threading.Thread(target=watch, daemon=True).start()
    print(server.port, flush=True)
    server.run()
    end.stop()
    print(process.communicate()[0].decode(), flush=True)
    end.close()


class Stream(asyncio.Protocol):
    """One streamed answer: when each of its events came."""

    def __init__(self, body: dict[str, object]) -> None:
        self.times_s: list[float] = []
        self.ended = asyncio.get_running_loop().create_future()
        self._body = json.dumps(body).encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        assert isinstance(transport, asyncio.WriteTransport)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        transport.write(head % len(self._body) + self._body)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Count what came; events are never cut, for they are small and sent whole."""
        self.times_s += [time.monotonic()] * data.count(b"data: {")
        if b"data: [DONE]" in data:
            self._transport.close()
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """An answer that breaks off ends the benchmark."""
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("a stream broke off"))


@dataclass
class Figures:
    """One run. Gaps in seconds; `cpu_s` of the front over the run."""

    tokens: int
    cpu_s: float
    gaps_s: list[float]
    span_s: tuple[float, float]


def cpu_s(pid: int) -> float:
    """User and system time of a process and all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def run(port: int, pid: int, streams: int, tokens: int, long_text: str = "") -> Figures:
    """All streams at once; with `long_text` that is posted in the middle, by a process of its own."""
    loop = asyncio.get_running_loop()
    body: dict[str, object] = {"prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    before_s = cpu_s(pid)
    made = [(await loop.create_connection(lambda: Stream(body), "127.0.0.1", port))[1] for _ in range(streams)]
    if long_text:
        await asyncio.sleep(1.0)
        command = [sys.executable, __file__, "--post", str(port)]
        poster = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        told, _ = await poster.communicate(json.dumps({"prompt": long_text, "max_tokens": 1}).encode())
        assert json.loads(told)["usage"]["prompt_tokens"] >= LONG_PROMPT_TOKENS, told[:500]
    await asyncio.gather(*(one.ended for one in made))
    took_s = cpu_s(pid) - before_s
    from_s, to_s = max(one.times_s[0] for one in made) + SETTLING_S, min(one.times_s[-1] for one in made)
    gaps_s = [
        later - earlier
        for one in made
        for earlier, later in pairwise(one.times_s)
        if from_s <= earlier and later <= to_s
    ]
    return Figures(sum(len(one.times_s) for one in made), took_s, gaps_s, (from_s, to_s))


def post(port: int) -> None:
    """Send standing input as one request and print the answer."""
    import urllib.request

    kind = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", sys.stdin.buffer.read(), kind)
    with urllib.request.urlopen(request, timeout=120) as answer:
        print(answer.read().decode())


def long_text() -> str:
    """A text of at least `LONG_PROMPT_TOKENS` tokens."""
    codec = TextCodec.from_checkpoint(open_checkpoint(None))
    sentence = " It was the best of times, it was the worst of times, 17 days before the 3rd of May;"
    return sentence * (LONG_PROMPT_TOKENS // len(codec.encode(sentence)) + 1)


def main() -> None:
    """Run, print the figures and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100.0, help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--front", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--post", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        to_engine, to_front = options.engine
        engine(to_engine, to_front, options.rate)
    elif options.front:
        front(options.rate)
    elif options.post:
        post(options.post)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """The client's process."""
    command = [sys.executable, __file__, "--front", "--rate", str(options.rate)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port, text = int(server.stdout.readline()), long_text()
    tokens = int(options.seconds * options.rate)
    asyncio.run(run(port, server.pid, 4, 20))
    quiet = [asyncio.run(run(port, server.pid, options.streams, tokens)) for _ in range(options.repeats)]
    beside = [asyncio.run(run(port, server.pid, options.streams, tokens, text)) for _ in range(options.repeats)]
    told_s = json.loads(server.communicate()[0])
    metrics: dict[str, float] = {}
    for name, runs in (("quiet", quiet), ("beside_200k", beside)):
        for number, one in enumerate(runs):
            steps_s = [at_s for at_s in told_s if one.span_s[0] <= at_s <= one.span_s[1]]
            engine_gaps_s = [later - earlier for earlier, later in pairwise(steps_s)]
            metrics |= {
                f"{name}_{number}_front_us": one.cpu_s / one.tokens * 1e6,
                f"{name}_{number}_gap_p99_ms": quantile(one.gaps_s, 0.99) * 1e3,
                f"{name}_{number}_engine_gap_p99_ms": quantile(engine_gaps_s, 0.99) * 1e3,
                f"{name}_{number}_gap_longest_ms": max(one.gaps_s) * 1e3,
                f"{name}_{number}_engine_gap_longest_ms": max(engine_gaps_s) * 1e3,
            }
    metrics["front_us"] = min(metrics[f"quiet_{n}_front_us"] for n in range(options.repeats))
    metrics["added_gap_p99_ms"] = min(
        metrics[f"quiet_{n}_gap_p99_ms"] - metrics[f"quiet_{n}_engine_gap_p99_ms"] for n in range(options.repeats)
    )
    for key, value in metrics.items():
        print(f"{key:45} {value:8.2f}")
    print("wrote", record("server_overhead", metrics))


if __name__ == "__main__":
    main()
