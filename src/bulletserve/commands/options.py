"""The flags that several subcommands share, named as vLLM's users know them, and how they become a config.

Knows nothing about what is done with the config.
"""

import argparse

from bulletserve.commands.numbers import any_whole, number
from bulletserve.core.config import (
    DEVICES,
    DTYPES,
    GPU_MEMORY_UTILIZATION,
    MOST_DECODE_SHARES,
    EngineConfig,
    gpu_only,
)

POLICY_HELP = (
    "time_sliced, chunked_prefill, static_split or bullet, as NAME or NAME:option=value,... (docs/policies.md)"
)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that describe an engine."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "model",
        nargs="?",
        help="a .gguf file, a folder in Hugging Face layout, a hub name, or a config.json with --load-format dummy; "
        "the packaged SmolLM2-135M-Instruct by default",
    )
    group.add_argument("--device", choices=DEVICES, default="auto", help="auto: a GPU where there is one")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: bfloat16 where it is fast")
    group.add_argument(
        "--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights (%(default)s)"
    )
    group.add_argument("--max-model-len", type=any_whole, metavar="TOKENS", help="longest prompt plus output")
    group.add_argument("--max-num-seqs", type=any_whole, metavar="N", help="most requests running at once")
    group.add_argument(
        "--block-size", type=any_whole, default=16, metavar="TOKENS", help="tokens of a cache block (%(default)s)"
    )
    group.add_argument("--num-gpu-blocks-override", type=any_whole, metavar="N", help="cache blocks, on any device")
    group.add_argument(
        "--gpu-memory-utilization",
        type=number,
        metavar="SHARE",
        help=f"share of a GPU's memory that the whole engine may take ({GPU_MEMORY_UTILIZATION})",
    )
    group.add_argument(
        "--decode-shares",
        type=_numbers,
        metavar="SMS,...",
        help=f"advanced: the SMs of decode in each partition of a GPU, at most {MOST_DECODE_SHARES}; chosen by default",
    )
    group.add_argument("--no-enable-prefix-caching", action="store_true", help="do not reuse equal prefixes")
    group.add_argument("--seed", type=any_whole, default=0, help="seed of dummy weights (%(default)s)")


def engine_flags_given(options: argparse.Namespace) -> list[str]:
    """Those flags of an engine (`MODEL`, too) that are not as by default, as they are written."""
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return [
        "--" + name.replace("_", "-") if name != "model" else "MODEL"
        for name, default in vars(parser.parse_args([])).items()
        if getattr(options, name) != default
    ]


def engine_config(options: argparse.Namespace, policy: str, *, caching: bool = True) -> EngineConfig:
    """The config that the flags ask for; without a prefix cache where `caching` is not wanted. Raises `ConfigError`."""
    share = options.gpu_memory_utilization
    if share is not None and options.device == "cpu":  # even if it is the default
        raise gpu_only("--gpu-memory-utilization")
    return EngineConfig(
        model=options.model,
        load_format=options.load_format,
        device=options.device,
        dtype=options.dtype,
        policy=policy,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        num_gpu_blocks_override=options.num_gpu_blocks_override,
        gpu_memory_utilization=GPU_MEMORY_UTILIZATION if share is None else share,
        decode_shares=options.decode_shares,
        enable_prefix_caching=caching and not options.no_enable_prefix_caching,
        seed=options.seed,
        ttft_slo_ms=getattr(options, "ttft_slo_ms", None),
        tpot_slo_ms=getattr(options, "tpot_slo_ms", None),
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 16,32,64") from None
