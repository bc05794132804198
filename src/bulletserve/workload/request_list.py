"""Lists of requests: when they arrive, how long their prompts and answers are.

Knows nothing about tokens' values. A list is made at a mean rate of one request a second; dividing its arrivals
by a rate gives the same requests at that rate. Published traces come as JSON lines with the keys `arrival`,
`prompt_tokens` and `output_tokens`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from bulletserve.core.errors import ConfigError
from bulletserve.core.json_text import parse_json

MOST_TOKENS = 10_000_000
"""Of a prompt or an answer: what is more is a mistake in the list."""


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """One request: arrival in seconds, lengths in tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def read_request_list(path: Path) -> tuple[RequestLengths, ...]:
    """Read a JSONL file. Raises `ConfigError` with the line number for a line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    requests: list[RequestLengths] = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
            request = RequestLengths(float(row["arrival"]), row["prompt_tokens"], row["output_tokens"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ConfigError(f"{path}, line {number}: not a request ({error!r})") from None
        if not 0 <= request.arrival_s < inf:
            raise ConfigError(f"{path}, line {number}: an arrival is a number of seconds, 0 or more")
        if any(type(n) is not int or not 1 <= n <= MOST_TOKENS for n in (request.prompt_tokens, request.output_tokens)):
            raise ConfigError(f"{path}, line {number}: lengths must be whole numbers from 1 to {MOST_TOKENS}")
        requests.append(request)
    return tuple(requests)


def lognormal_requests(
    count: int, seed: int, prompt_median: int = 800, output_median: int = 120, sigma: float = 0.8
) -> tuple[RequestLengths, ...]:
    """Poisson arrivals at one a second with lognormal lengths, capped at 16000 and 2000 tokens."""
    rng = random.Random(seed)
    requests: list[RequestLengths] = []
    arrival_s = 0.0
    for _ in range(count):
        prompt = min(16000, max(4, round(prompt_median * rng.lognormvariate(0, sigma))))
        output = min(2000, max(2, round(output_median * rng.lognormvariate(0, sigma))))
        requests.append(RequestLengths(arrival_s, prompt, output))
        arrival_s += rng.expovariate(1.0)
    return tuple(requests)


def at_rate(requests: Sequence[RequestLengths], rate: float) -> tuple[RequestLengths, ...]:
    """The same requests, `rate` of them a second in the mean."""
    return tuple(RequestLengths(r.arrival_s / rate, r.prompt_tokens, r.output_tokens) for r in requests)


def with_new_gaps(requests: Sequence[RequestLengths], seed: int) -> tuple[RequestLengths, ...]:
    """The same lengths in the same order, arriving at one a second in the mean with gaps drawn from a seed."""
    rng, arrival_s = random.Random(f"gaps {seed}"), 0.0
    found = []
    for one in requests:
        arrival_s += rng.expovariate(1.0)
        found.append(RequestLengths(arrival_s, one.prompt_tokens, one.output_tokens))
    return tuple(found)
