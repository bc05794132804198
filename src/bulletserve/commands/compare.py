"""`bullet compare`: the same requests under several policies, in one table, with ratios to the first."""

import argparse
import json
import random
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bulletserve.cache_files import write_whole
from bulletserve.commands.numbers import rate
from bulletserve.commands.options import add_engine_arguments, engine_config
from bulletserve.commands.outputs import check_outputs
from bulletserve.comparison import (
    FIGURES,
    ArmRun,
    TimedPrompt,
    compare,
    medians,
    paired_ratios,
    same_answers,
)
from bulletserve.compose import Engine, build_engine
from bulletserve.core.errors import ConfigError
from bulletserve.scheduler.policies import make_policy
from bulletserve.server.text_codec import TextCodec
from bulletserve.workload.prompt_list import read_prompt_list
from bulletserve.workload.request_list import at_rate, lognormal_requests, read_request_list

DEFAULT_POLICIES = "time_sliced chunked_prefill static_split bullet"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Engine flags and the list of requests."""
    add_engine_arguments(parser)
    parser.add_argument(
        "--policies",
        nargs="+",
        default=DEFAULT_POLICIES.split(),
        help="arms, as NAME or NAME:option=value; ratios are to the first",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL of arrival, messages, max_tokens")
    source.add_argument("--workload", type=Path, metavar="FILE", help="JSONL of arrival, prompt_tokens, output_tokens")
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="how many, of a workload")
    parser.add_argument("--rate", type=rate, default=2.0, help="requests a second, of a workload")
    parser.add_argument("--rounds", type=int, default=1, help="runs of every arm, in alternating order")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run's figures there")


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    if options.rounds < 1 or options.requests < 1:
        raise ConfigError("--rounds and --requests must be above 0")
    for policy in options.policies:
        make_policy(policy)
    if len(set(options.policies)) != len(options.policies):
        raise ConfigError("--policies: every policy may be named once")
    check_outputs({"--json": options.json})
    engine = build_engine(engine_config(options, options.policies[0]))
    try:
        prompts = _prompts(options, engine)
        console = Console()
        console.print(engine.info.describe(), *engine.info.notes, sep="\n")
        with console.status("") as status:
            results = compare(engine, options.policies, prompts, options.rounds, status.update)
    finally:
        engine.close()
    console.print(_table(options.policies, results, len(prompts)))
    console.print(f"Ratios are to {options.policies[0]}; more is better for tokens/s, less for all the times.")
    if engine.info.dtype == "bfloat16":
        remedy = "; --dtype float32 shows none" if engine.info.device.startswith("CPU") else ""
        console.print(f"In bfloat16 a near tie may fall either way, by what shares a batch{remedy}.")
    if options.json is not None:
        write_whole(options.json, json.dumps(_document(options.policies, results), indent=1) + "\n")
    return 0


def timed_prompts(path: Path, engine: Engine) -> list[TimedPrompt]:
    """A file of chats as the model's prompts."""
    codec = TextCodec.from_checkpoint(engine.checkpoint)
    return [
        TimedPrompt(chat.arrival_s, tuple(codec.encode_chat(chat.messages)), chat.max_tokens)
        for chat in read_prompt_list(path)
    ]


def _prompts(options: argparse.Namespace, engine: Engine) -> list[TimedPrompt]:
    if options.prompts:
        prompts = timed_prompts(options.prompts, engine)
    else:
        lengths = (
            read_request_list(options.workload)
            if options.workload
            else lognormal_requests(options.requests, seed=7, prompt_median=200, output_median=40)
        )
        rng = random.Random(7)
        vocabulary = engine.info.vocab_size
        prompts = [
            TimedPrompt(r.arrival_s, tuple(rng.randrange(vocabulary) for _ in range(r.prompt_tokens)), r.output_tokens)
            for r in at_rate(lengths[: options.requests], options.rate)
        ]
    if not prompts:
        raise ConfigError("the list holds no requests")
    longest = max(len(prompt.prompt_ids) + prompt.output_tokens for prompt in prompts)
    if longest > engine.info.max_model_len:
        raise ConfigError(f"a request needs {longest} tokens, the context holds {engine.info.max_model_len}")
    return prompts


def _table(policies: list[str], results: list[list[ArmRun]], requests: int) -> Table:
    rounds = len(results)
    title = f"{requests} requests, median of {rounds} rounds" if rounds > 1 else f"{requests} requests, one round"
    table = Table("", title=title, title_justify="left")
    for policy in policies:
        table.add_column(policy, justify="right")
    arms = range(len(policies))
    figures = [medians(results, arm) for arm in arms]
    ratios = [paired_ratios(results, arm) for arm in arms]
    for name, label in FIGURES.items():
        table.add_row(label, *(f"{_figure(name, figures[arm][name])} {ratios[arm][name]:6.2f}x" for arm in arms))
    both = [sum(runs[arm].both_lanes_share for runs in results) / rounds for arm in arms]
    table.add_row("both lanes busy", *(f"{share:.0%} of the time" for share in both))
    table.add_row("same answers", *(f"{same_answers(results, arm):.0%}" for arm in arms))
    return table


def _figure(name: str, value: float) -> str:
    return f"{value:.1f}" if name == "tokens_per_s" else f"{value * 1e3:.0f} ms"


def _document(policies: list[str], results: list[list[ArmRun]]) -> dict[str, object]:
    return {
        "policies": policies,
        "medians": {policy: medians(results, arm) for arm, policy in enumerate(policies)},
        "ratios_x": {policy: paired_ratios(results, arm) for arm, policy in enumerate(policies)},
        "same_answers": {policy: same_answers(results, arm) for arm, policy in enumerate(policies)},
        "rounds": [
            {
                run.policy: {name: getattr(run.summary, name) for name in FIGURES}
                | {"both_lanes_share": run.both_lanes_share, "preemptions": run.preemptions}
                for run in arms
            }
            for arms in results
        ],
    }
