"""What `bullet bench` asks, from what the user names: a list, a trace, texts, or lengths.

Knows nothing about servers.
"""

import argparse
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bulletserve.client.prompts import TimedPrompt, prompts_of_lengths, prompts_of_texts
from bulletserve.core.errors import ConfigError
from bulletserve.workload.arrivals import POISSON, RECORDED, Arrivals, one_a_second, recorded_rate
from bulletserve.workload.length_rule import LengthRule, drawn_requests
from bulletserve.workload.named import open_workload
from bulletserve.workload.request_list import RequestLengths
from bulletserve.workload.sharegpt import estimated_tokens, read_sharegpt
from bulletserve.workload.traces import read_trace_file

_DEFAULT_COUNT = 200
_LONGEST_ANSWER_TOKENS = 4000


@dataclass(frozen=True)
class Asked:
    """Requests that arrive one a second in the mean. `rate`: at which they were recorded.

    `prompts(run)`: what is asked in run number `run`: other tokens in each, unless it is texts or was to be the same.
    """

    name: str
    origin: str
    arrivals: Arrivals
    count: int
    prompts: Callable[[int], Sequence[TimedPrompt]]
    rate: float | None = None


@dataclass(frozen=True)
class _Source:
    """Requests of one kind. `recorded`: whether their arrival times say anything."""

    name: str
    origin: str
    requests: Sequence[RequestLengths]
    recorded: bool
    blocks: Sequence[Sequence[int]] = ()
    texts: Sequence[str] = ()
    rate: float | None = None


def asked_for(options: argparse.Namespace, count_tokens: Callable[[str], int] | None) -> Asked:
    """The requests that the options name. `count_tokens`: of a tokenizer, if one was named. Raises `ConfigError`."""
    source = _source(options, count_tokens)
    if not source.requests:
        raise ConfigError("there are no requests")
    arrivals = (
        Arrivals.parse(options.arrivals) if options.arrivals else Arrivals(RECORDED if source.recorded else POISSON)
    )
    if arrivals.kind == RECORDED and not source.recorded:
        raise ConfigError(f"--arrivals recorded: {source.origin} tells no times; use poisson, gamma:CV or even")
    arranged = arrivals.arrange(source.requests, options.seed)
    as_text = options.prompts == "text" or options.endpoint == "chat"
    once = 0 if options.same_prompts else secrets.randbits(32)

    def prompts(run: int) -> Sequence[TimedPrompt]:
        if source.texts:
            return prompts_of_texts(arranged, source.texts)
        salt = (options.seed, once, 0 if options.same_prompts else run)
        return prompts_of_lengths(arranged, source.blocks, as_text=as_text, ids=options.token_ids, salt=salt)

    return Asked(source.name, source.origin, arrivals, len(arranged), prompts, source.rate)


def _source(options: argparse.Namespace, count_tokens: Callable[[str], int] | None) -> _Source:
    count: int | None = options.requests
    lengths = options.prompt_tokens is not None or options.output_tokens is not None
    if lengths and (options.workload or options.trace):
        raise ConfigError("--prompt-tokens and --output-tokens are for made-up requests: a list has lengths of its own")
    if options.workload:
        workload = open_workload(options.workload)
        return _Source(workload.name, workload.origin, workload.requests[:count], True)
    if options.trace:
        trace = read_trace_file(options.trace).first(count)
        same = len({one.arrival_s for one in trace.requests}) == 1
        return _Source(
            trace.name,
            f"{options.trace}, as recorded",
            trace.requests if same else one_a_second(trace.requests),
            not same,
            trace.blocks,
            rate=None if same else recorded_rate(trace.requests),
        )
    output = LengthRule.parse(options.output_tokens) if options.output_tokens else None
    if options.sharegpt:
        return _sharegpt(options.sharegpt, output, count, options.seed, count_tokens)
    prompt = LengthRule.parse(options.prompt_tokens or "lognormal:800:0.8")
    requests = drawn_requests(count or _DEFAULT_COUNT, prompt, output or LengthRule.parse("lognormal:120:0.8"),
                              options.seed)  # fmt: skip
    return _Source("synthetic", f"made up with seed {options.seed}", requests, False)


def _sharegpt(
    path: Path, output: LengthRule | None, count: int | None, seed: int, count_tokens: Callable[[str], int] | None
) -> _Source:
    """The first exchanges of a file; without a rule, answers are to be as long as the recorded ones."""
    exchanges = read_sharegpt(path)[: count or _DEFAULT_COUNT]
    tokens_of = count_tokens or estimated_tokens
    rng = random.Random(f"lengths {seed}")
    requests = tuple(
        RequestLengths(
            float(number),
            tokens_of(one.prompt),
            output.draw(rng) if output else min(_LONGEST_ANSWER_TOKENS, tokens_of(one.answer)),
        )
        for number, one in enumerate(exchanges)
    )
    how = "counted" if count_tokens else "estimated at four characters a token"
    return _Source(path.stem, f"{path}, lengths {how}", requests, False, texts=[one.prompt for one in exchanges])
