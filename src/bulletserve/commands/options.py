"""The flags that several subcommands share, named as vLLM's users know them, and how they become a config.

Knows nothing about what is done with the config.
"""

import argparse

from bulletserve.core.config import DEVICES, DTYPES, EngineConfig


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that describe an engine."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "model",
        nargs="?",
        help="a .gguf file, a folder in Hugging Face layout, a hub name, or a config.json with --load-format dummy; "
        "the packaged SmolLM2-135M-Instruct by default",
    )
    group.add_argument("--device", choices=DEVICES, default="auto")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: bfloat16 where it is fast")
    group.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    group.add_argument("--max-model-len", type=int, metavar="TOKENS", help="longest prompt plus output")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="most requests running at once")
    group.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="tokens of a cache block")
    group.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="cache blocks, on any device")
    group.add_argument("--no-enable-prefix-caching", action="store_true", help="do not reuse equal prefixes")
    group.add_argument("--seed", type=int, default=0, help="seed of dummy weights")


def engine_config(options: argparse.Namespace, policy: str) -> EngineConfig:
    """The config that the flags ask for. Raises `ConfigError`."""
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
        enable_prefix_caching=not options.no_enable_prefix_caching,
        seed=options.seed,
        ttft_slo_ms=getattr(options, "ttft_slo_ms", None),
        tpot_slo_ms=getattr(options, "tpot_slo_ms", None),
    )
