"""`bullet generate`: complete prompts on this machine, without a server."""

import argparse
import sys
import time

from bulletserve.commands.numbers import any_whole, number
from bulletserve.commands.options import POLICY_HELP, add_engine_arguments, engine_config
from bulletserve.core.errors import ConfigError
from bulletserve.core.request import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Engine flags, prompts and sampling."""
    add_engine_arguments(parser)
    parser.add_argument("--policy", default="static_split", help=f"{POLICY_HELP} (%(default)s)")
    parser.add_argument(
        "-p", "--prompt", action="append", metavar="TEXT", help="may be repeated; standard input if there is none"
    )
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message to the chat template")
    parser.add_argument("--max-tokens", type=any_whole, default=128, help="longest answer (%(default)s)")
    parser.add_argument("--temperature", type=number, default=0.0, help="0: always the likeliest token (%(default)g)")
    parser.add_argument(
        "--top-p", type=number, default=1.0, help="draw from the likeliest that make up this share (%(default)g: all)"
    )
    parser.add_argument("--top-k", type=any_whole, default=0, help="draw from so many likeliest (%(default)s: all)")
    parser.add_argument("--sampling-seed", type=any_whole, metavar="SEED", help="for the same draws again")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens, whatever the model says")


def run(options: argparse.Namespace) -> int:
    """Print the prompts' answers in order, and a line of figures to standard error. Raises what ended one of them."""
    params = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.sampling_seed,
        max_tokens=options.max_tokens,
        stop=tuple(options.stop),
        ignore_eos=options.ignore_eos,
    )
    prompts = options.prompt or ([] if sys.stdin.isatty() else [sys.stdin.read().strip()])
    if not prompts or not all(prompts):
        raise ConfigError("nothing to complete: give --prompt TEXT, or text on standard input")
    from bulletserve.llm import LLM

    with LLM(config=engine_config(options, options.policy)) as llm:
        started_s = time.monotonic()
        if options.chat:
            answers = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        else:
            answers = llm.generate(prompts, params)
        took_s = time.monotonic() - started_s
    for answer in answers:
        print(answer.text)
    tokens = sum(len(answer.token_ids) for answer in answers)
    print(f"{tokens} tokens in {took_s:.2f} s, {tokens / took_s:.1f} tokens/s", file=sys.stderr)
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return 0
