"""What `bullet compare` serves, from what the user names: chats, a workload, or lengths that it makes up.

Knows nothing about arms. Token ids are random, other ones at every rate and in every round and the same for all arms,
which each begin with an empty cache: nobody is helped by what another run left behind, and answers can be compared.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bulletserve.client.prompts import prompts_of_lengths
from bulletserve.commands.numbers import requests
from bulletserve.comparison.arm_run import TimedPrompt
from bulletserve.comparison.fingerprint import digest, digest_of
from bulletserve.comparison.measuring import Requests
from bulletserve.compose import Engine
from bulletserve.core.errors import ConfigError
from bulletserve.server.text_codec import TextCodec
from bulletserve.simulator.experiment import arrivals
from bulletserve.workload.named import BUILT_IN, Workload, open_workload
from bulletserve.workload.prompt_list import read_prompt_list
from bulletserve.workload.request_list import lognormal_requests

MADE_UP = 16
_SEED = 7  # of what is made up where nothing is named
_IDS = 64
"""From so many ids prompts are drawn: enough that no two share a block, few enough that records stay small."""


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Where requests come from."""
    group = parser.add_argument_group("requests (some made-up ones by default)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL of arrival, messages, max_tokens")
    source.add_argument("--workload", help=f"a .jsonl list, a .csv trace, or one of {', '.join(BUILT_IN)}")
    group.add_argument("--requests", type=requests, metavar="N", help=f"the first N; of made-up ones {MADE_UP}")


def named_workload(options: argparse.Namespace) -> Workload | None:
    """The lengths that are wanted; None for `--prompts`. Raises `ConfigError`."""
    if options.prompts is not None:
        return None
    if options.workload is None:
        made = lognormal_requests(options.requests or MADE_UP, seed=_SEED, prompt_median=200, output_median=40)
        return Workload("made-up", made, f"made up with seed {_SEED}")
    named = open_workload(options.workload)
    return Workload(named.name, named.requests[: options.requests], named.origin)


def requests_of(options: argparse.Namespace, workload: Workload | None, engine: Engine) -> Requests:
    """As the arms of `engine` are given them. Raises `ConfigError` for one that does not fit."""
    if workload is None:
        chats = timed_prompts(options.prompts, engine)[: options.requests]
        name, count = options.prompts.stem, len(chats)
        found = Requests(name, count, digest(chats), options.seed, lambda rate, _: _paced(chats, rate))
        _check_fit([(len(one.prompt_ids), one.output_tokens) for one in chats], engine)
        return found
    lengths, ids = workload.requests, (0, min(_IDS, engine.info.vocab_size))
    _check_fit([(one.prompt_tokens, one.output_tokens) for one in lengths], engine)

    def prompts(rate: float, number: int) -> Sequence[TimedPrompt]:
        arriving = arrivals(lengths, rate, options.seed)
        salt = (options.seed, number, round(rate * 1e6))
        made = prompts_of_lengths(arriving, as_text=False, ids=ids, salt=salt)
        return [TimedPrompt(one.due_s, [*map(int, one.prompt)], one.output_tokens) for one in made]

    return Requests(workload.name, len(lengths), digest_of(lengths), options.seed, prompts)


def timed_prompts(path: Path, engine: Engine) -> list[TimedPrompt]:
    """A file of chats as the model's prompts."""
    codec = TextCodec.from_checkpoint(engine.checkpoint)
    return [
        TimedPrompt(chat.arrival_s, tuple(codec.encode_chat(chat.messages)), chat.max_tokens)
        for chat in read_prompt_list(path)
    ]


def _paced(prompts: Sequence[TimedPrompt], rate: float) -> list[TimedPrompt]:
    return [TimedPrompt(one.arrival_s / rate, one.prompt_ids, one.output_tokens) for one in prompts]


def _check_fit(lengths: Sequence[tuple[int, int]], engine: Engine) -> None:
    for number, (prompt, output) in enumerate(lengths, 1):
        if prompt + output > engine.info.max_model_len:
            raise ConfigError(
                f"request {number} needs {prompt} + {output} tokens, the context holds {engine.info.max_model_len}: "
                "raise --max-model-len, or name other requests"
            )
