"""From a checkpoint to an engine that can run steps: dtype, weights, cache size, lanes.

Knows nothing about policies or requests. Decides what the options left open, and returns it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError
from bulletserve.core.partition import Lattice
from bulletserve.core.ports import Poster
from bulletserve.core.shapes import ModelShape
from bulletserve.engine.executor import CpuExecutor
from bulletserve.engine.kv_cache import KvCache, bytes_per_block
from bulletserve.engine.seats import SeatTable
from bulletserve.engine.step_runner import StepRunner
from bulletserve.models.decoder import Decoder
from bulletserve.resources.cpu_threads import cpu_lattice, usable_cores

CPU_MAX_SEQS = 32
CPU_KV_BYTES = 2**30
CPU_KV_SHARE = 0.4
"""The cache takes at most this share of the memory that is available, and at most `CPU_KV_BYTES`."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How many blocks there are, and the longest request they are meant for."""

    total_blocks: int
    max_model_len: int
    max_seqs: int


def choose_device(wanted: str) -> str:
    """The device to run on. Raises `ConfigError` for one that this version cannot drive."""
    if wanted == "cuda":
        raise ConfigError("this version runs on the CPU only: leave --device out, or say --device cpu")
    return "cpu"


def choose_dtype(wanted: str) -> torch.dtype:
    """bfloat16 where the CPU multiplies it natively, else float32, unless one was asked for."""
    if wanted == "float16":
        raise ConfigError("float16 is slow and imprecise on a CPU: use --dtype bfloat16 or float32")
    if wanted != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[wanted]
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", None) or getattr(torch.cpu, "_is_amx_tile_supported", None)
    return torch.bfloat16 if native is not None and native() else torch.float32


def size_cache(
    config: EngineConfig, shape: ModelShape, dtype: torch.dtype, kv_bytes: int, kv_limit_bytes: int
) -> CacheSize:
    """The largest context that fits, unless a length or a number of blocks was asked for.

    `kv_bytes` is the memory the cache takes by itself, `kv_limit_bytes` the most it can be told to take.
    Raises `ConfigError` when a wish does not fit.
    """
    max_seqs = config.max_num_seqs or CPU_MAX_SEQS
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
        blocks = min(kv_bytes // bytes_per_block(shape, size, dtype), max_seqs * -(-longest // size))
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


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 * 2**30


def load_cpu_executor(
    model: Decoder, size: CacheSize, block_size: int, poster: Poster, cores: int | None = None
) -> CpuExecutor:
    """Cache, seats and lanes around a model, ready to start steps."""
    lattice: Lattice = cpu_lattice(cores or usable_cores())
    device = torch.device("cpu")
    cache = KvCache(model.shape, size.total_blocks + 1, block_size, model.dtype, device)
    seats = SeatTable(size.max_seqs, -(-size.max_model_len // block_size) + 1, device)
    return CpuExecutor(StepRunner(model, cache, seats), seats, lattice, poster)
