"""How many blocks the cache gets, and the longest request that makes possible.

Knows nothing about where the memory is.
"""

from dataclasses import dataclass

import torch

from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError
from bulletserve.core.shapes import ModelShape
from bulletserve.core.snapshot import MOST_BLOCKS
from bulletserve.engine.kv_cache import bytes_per_block


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How many blocks there are, and the longest request they are meant for."""

    total_blocks: int
    max_model_len: int
    max_seqs: int


def size_cache(
    config: EngineConfig,
    shape: ModelShape,
    dtype: torch.dtype,
    kv_bytes: int,
    kv_limit_bytes: int,
    max_seqs: int,
) -> CacheSize:
    """The largest context that fits, unless a length or a number of blocks was asked for.

    `kv_bytes` is the memory the cache takes by itself, `kv_limit_bytes` the most it can be told to take; at most
    `max_seqs` requests run at once.
    Raises `ConfigError` when a wish does not fit.
    """
    size = config.block_size
    if config.max_model_len is not None and config.max_model_len > shape.max_context:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is above the model's context of {shape.max_context} tokens: "
            f"use at most {shape.max_context}"
        )
    longest = config.max_model_len or shape.max_context
    if config.num_gpu_blocks_override is not None:
        blocks = config.num_gpu_blocks_override
    else:
        blocks = min(kv_bytes // bytes_per_block(shape, size, dtype), max_seqs * -(-longest // size), MOST_BLOCKS)
    if config.max_model_len is not None and blocks * size < config.max_model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} needs {-(-config.max_model_len // size)} cache blocks of {size} "
            f"tokens, but there are {blocks}: use at most {blocks * size}, or give more blocks"
        )
    needed = blocks * bytes_per_block(shape, size, dtype)
    if needed > kv_limit_bytes:
        most = kv_limit_bytes // bytes_per_block(shape, size, dtype)
        raise ConfigError(
            f"{blocks} cache blocks need {needed / 2**30:.1f} GiB, of {kv_limit_bytes / 2**30:.1f} GiB available: use "
            f"at most --num-gpu-blocks-override {most}"
        )
    max_model_len = min(longest, blocks * size)
    if max_model_len < 2:
        raise ConfigError(
            f"a context of {max_model_len} tokens holds no prompt with an answer: the model allows "
            f"{shape.max_context}, the cache {blocks * size} tokens"
        )
    return CacheSize(blocks, max_model_len, max_seqs)
