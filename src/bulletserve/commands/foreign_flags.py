"""Flags that people know from other servers: each means one of ours, or says what to use instead.

Knows nothing about what ours do. None is taken and then ignored: what we always do may be asked for, what we never do
is refused, by name, with the way to go.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from bulletserve.commands.numbers import any_whole
from bulletserve.core.errors import ConfigError

_SAME = {
    "--model-path": "model_flag",
    "--tokenizer-path": "tokenizer",
    "--context-length": "max_model_len",
    "--max-running-requests": "max_num_seqs",
    "--max-queued-requests": "max_waiting",
    "--max-waiting-queue-length": "max_waiting",
    "--page-size": "block_size",
    "--random-seed": "seed",
}
_TEXTS = frozenset({"model_flag", "tokenizer"})

_ALWAYS = {
    "--enable-metrics": "/metrics is always served",
    "--enable-request-id-headers": "x-request-id always comes back",
    "--enable-prompt-tokens-details": "usage always has the cached tokens",
}

_ONLY = {
    **dict.fromkeys(("--tensor-parallel-size", "--tp-size", "--tp", "-tp"), ("1", "one engine is one device")),
    "--max-logprobs": ("20", "requests may ask for the 20 likeliest tokens"),
    "--kv-cache-dtype": ("auto", "the cache has the weights' type"),
}

_CHUNKED = "--policy chunked_prefill runs mixed steps, --policy chunked_prefill:budget=TOKENS sets their size"
_ORDER = (
    "lower priorities are always served first; after that a policy orders, as with --policy bullet:ordering=fcfs or "
    "bullet:ordering=slack"
)
_INSTEAD = {
    "--trust-remote-code": "no code that comes with a checkpoint is run; leave it out",
    "--quantization": "weights are served as the checkpoint has them: name a GGUF file of the wanted quantisation",
    "--mem-fraction-static": "it is another quantity here: --gpu-memory-utilization is the share of the whole engine",
    "--max-num-batched-tokens": _CHUNKED,
    "--chunked-prefill-size": _CHUNKED,
    "--max-prefill-tokens": "policies size their prefill batches: --policy static_split:batch_tokens=TOKENS",
    "--enable-chunked-prefill": _CHUNKED,
    "--enable-mixed-chunk": _CHUNKED,
    "--long-prefill-token-threshold": "long prompts are cut and overtaken by short ones under every policy",
    "--max-num-partial-prefills": "long prompts are cut and overtaken by short ones under every policy",
    "--prefill-decode-interval": "--policy bullet paces decode by its targets: --tpot-slo-ms",
    "--scheduling-policy": _ORDER,
    "--schedule-policy": _ORDER,
    "--schedule-conservativeness": "admission reserves what it promises; there is nothing to weigh",
    "--enforce-eager": "partitions of a GPU are kept by graphs; there is no other way to run decode",
    "--disable-cuda-graph": "partitions of a GPU are kept by graphs; there is no other way to run decode",
    "--cuda-graph-max-bs": "graphs are captured up to --max-num-seqs",
    "--reasoning-parser": "reasoning is not split from answers; they come as the model writes them",
    "--tokenizer-worker-num": "long texts are tokenised in two threads beside the front, without Python's lock",
    "--enable-pdmux": "--policy static_split and --policy bullet run prefill and decode side by side",
}


def add_foreign_arguments(parser: argparse.ArgumentParser) -> None:
    """Every flag of this page, none of which the help shows."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flag, dest in _SAME.items():
        parser.add_argument(flag, dest=dest, type=str if dest in _TEXTS else any_whole, **hidden)
    parser.add_argument("--disable-radix-cache", dest="no_enable_prefix_caching", action="store_true", **hidden)
    parser.add_argument("--enable-prefix-caching", dest="no_enable_prefix_caching", action="store_false", **hidden)
    for flag in _ALWAYS:
        parser.add_argument(flag, action="store_true", **hidden)
    for flag in _ONLY:
        parser.add_argument(flag, action=_Only, **hidden)
    for flag in _INSTEAD:
        parser.add_argument(flag, action=_Refused, nargs="?", **hidden)


class _Judged(argparse.Action):
    """A flag that says something or nothing, and is never kept."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        self.judge(option_string or self.option_strings[0], values)

    def judge(self, flag: str, values: str | Sequence[Any] | None) -> None:
        """Raise `ConfigError` with the fix in it, or accept."""


class _Only(_Judged):
    """Takes the one value that we have."""

    def judge(self, flag: str, values: str | Sequence[Any] | None) -> None:
        only, why = _ONLY[flag]
        if values != only:
            raise ConfigError(f"{flag} {values}: {why}, so only {only} is possible")


class _Refused(_Judged):
    """Says what to use instead."""

    def judge(self, flag: str, values: str | Sequence[Any] | None) -> None:
        raise ConfigError(f"{flag} is not a flag of bullet: {_INSTEAD[flag]}")
