"""Long prompts among streams and short prompts, through a running server: who waits for whom?

    bullet serve MODEL --policy bullet & python benchmarks/long_prompts.py --name long_prompts_bullet

`freeze`: 16 streams run; a prompt of 32,000 and then one of 100,000 tokens arrives. The longest gap of any stream from
that arrival until just after the newcomer's first token, beside the longest one before; the newcomer's TTFT, beside
that of the same prompt on an idle server.
`overtake`: a prompt of 100,000 tokens, and a tenth of a second later twenty of 50: their TTFT, and the long one's.
`flow`: a prompt of 32,000 tokens every two seconds among five short requests a second, for `--seconds`.

Token ids are random; every request asks for the targets `--slo-ms` (TTFT and TPOT) in the field `slo`, which other
servers ignore. Milliseconds; times count from when a request was due.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from itertools import count, pairwise

import numpy as np

from bulletserve.client.dialect import Dialect
from bulletserve.client.outcome import Outcome
from bulletserve.client.prompts import HIGH_ID, TimedPrompt
from bulletserve.client.replay import replay
from bulletserve.client.server import Server
from record import tell

STREAMS, STREAM_TOKENS = 16, 400
LONG = (32_000, 100_000)
SHORTS, SHORT_TOKENS = 20, 50
BEFORE_S, AFTER_S = 1.0, 0.1
Asked = tuple[float, int, int]
"""When it is due (seconds), tokens of its prompt, tokens of its answer."""


class Driver:
    """Sends lists of requests to one server."""

    def __init__(self, server: Server, dialect: Dialect, vocabulary: int) -> None:
        self._server, self._dialect, self._ids = server, dialect, range(vocabulary)
        self._random, self._numbers = random.Random(7), count()

    async def send(self, asked: Sequence[Asked]) -> list[Outcome]:
        """The outcomes in the order asked. Raises `RuntimeError` if one has failed."""
        prompts = [
            TimedPrompt(next(self._numbers), due_s, self._random.choices(self._ids, k=tokens), tokens, output)
            for due_s, tokens, output in asked
        ]
        run = await replay(self._server, self._dialect, prompts, 1.0, asyncio.Event())
        by_number = {outcome.number: outcome for outcome in run.outcomes}
        failed = next((outcome for outcome in run.outcomes if not outcome.ok), None)
        if failed is not None:
            raise RuntimeError(f"a request failed ({failed.kind}): {failed.message}")
        return [by_number[prompt.number] for prompt in prompts]

    async def alone_s(self, tokens: int) -> float:
        """TTFT of a prompt on an idle server."""
        (outcome,) = await self.send([(0.0, tokens, 2)])
        return outcome.answer.ttft_s


async def freeze(driver: Driver, long_tokens: int) -> dict[str, float]:
    """Streams while one long prompt arrives."""
    alone_s = await driver.alone_s(long_tokens)
    answer_tokens = STREAM_TOKENS + round(2.5 * alone_s / 0.005)  # streams outlast the prompt
    streams = [(0.0, SHORT_TOKENS, answer_tokens)] * STREAMS
    *watched, newcomer = await driver.send([*streams, (BEFORE_S, long_tokens, 2)])
    from_s = newcomer.answer.arrival_s
    to_s = newcomer.answer.token_times_s[0] + AFTER_S
    before, during = [], []
    for outcome in watched:
        times_s = outcome.answer.token_times_s
        if times_s[-1] < to_s:
            raise RuntimeError("a stream ended before the long prompt had its first token")
        for earlier, later in pairwise(times_s[1:]):
            if later < from_s:
                before.append(later - earlier)
            elif earlier < to_s:
                during.append(later - earlier)
    name = f"freeze_{long_tokens}"
    return {
        f"{name}_itl_before_p50_ms": 1e3 * float(np.median(before)),
        f"{name}_longest_gap_before_ms": 1e3 * max(before),
        f"{name}_itl_during_p50_ms": 1e3 * float(np.median(during)),
        f"{name}_longest_gap_during_ms": 1e3 * max(during),
        f"{name}_newcomer_ttft_ms": 1e3 * newcomer.answer.ttft_s,
        f"{name}_newcomer_alone_ms": 1e3 * alone_s,
    }


async def overtake(driver: Driver) -> dict[str, float]:
    """Short prompts behind a long one."""
    alone_s = await driver.alone_s(LONG[-1])
    long, *shorts = await driver.send([(0.0, LONG[-1], 2), *[(0.1, SHORT_TOKENS, 32)] * SHORTS])
    ttft_s = [outcome.answer.ttft_s for outcome in shorts]
    return {
        "overtake_shorts_ttft_p50_ms": 1e3 * float(np.median(ttft_s)),
        "overtake_shorts_ttft_most_ms": 1e3 * max(ttft_s),
        "overtake_long_ttft_ms": 1e3 * long.answer.ttft_s,
        "overtake_long_alone_ms": 1e3 * alone_s,
    }


async def flow(driver: Driver, seconds: float) -> dict[str, float]:
    """Long prompts again and again among short requests."""
    long = [(2.0 * n, LONG[0], 16) for n in range(int(seconds / 2))]
    short = [(0.2 * n + 0.05, SHORT_TOKENS, 64) for n in range(int(seconds * 5))]
    outcomes = await driver.send([*long, *short])
    longs_s = [outcome.answer.ttft_s for outcome in outcomes[: len(long)]]
    shorts_s = [outcome.answer.ttft_s for outcome in outcomes[len(long) :]]
    gaps_s = [gap for outcome in outcomes[len(long) :] for gap in outcome.answer.gaps_s]
    return {
        "flow_shorts_ttft_p50_ms": 1e3 * float(np.median(shorts_s)),
        "flow_shorts_ttft_p99_ms": 1e3 * float(np.quantile(shorts_s, 0.99)),
        "flow_longs_ttft_p50_ms": 1e3 * float(np.median(longs_s)),
        "flow_longs_ttft_most_ms": 1e3 * max(longs_s),
        "flow_shorts_itl_p50_ms": 1e3 * float(np.median(gaps_s)),
        "flow_shorts_itl_p99_ms": 1e3 * float(np.quantile(gaps_s, 0.99)),
        "flow_shorts_longest_gap_ms": 1e3 * max(gaps_s),
    }


async def measure(options: argparse.Namespace) -> dict[str, float]:
    """All three, one after the other."""
    ttft_ms, tpot_ms = options.slo_ms
    async with Server(f"{options.url}/v1") as server:
        dialect = Dialect(await server.model(), extra={"slo": {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms}})
        driver = Driver(server, dialect, options.vocabulary)
        figures: dict[str, float] = {}
        for tokens in LONG:
            figures |= await freeze(driver, tokens)
        figures |= await overtake(driver)
        return figures | await flow(driver, options.seconds)


def main() -> int:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--slo-ms", type=float, nargs=2, default=(10_000.0, 20.0), metavar=("TTFT", "TPOT"))
    parser.add_argument("--seconds", type=float, default=180.0, help="how long the flow lasts")
    parser.add_argument("--vocabulary", type=int, default=HIGH_ID, help="token ids are below this (%(default)s)")
    parser.add_argument("--name", default="long_prompts", help="of the JSON document")
    options = parser.parse_args()
    tell(options.name, asyncio.run(measure(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
