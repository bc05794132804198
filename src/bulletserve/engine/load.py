"""From a checkpoint to an engine that can run steps: dtype, weights, cache size, lanes.

Knows nothing about policies or requests. Decides what the options left open, and returns it.
"""

import os
from pathlib import Path

import torch

from bulletserve.core.config import CUDA_TORCH, EngineConfig
from bulletserve.core.errors import ConfigError
from bulletserve.core.partition import Lattice
from bulletserve.core.ports import Poster
from bulletserve.core.snapshot import MAX_BATCH_TOKENS
from bulletserve.engine.cache_size import CacheSize, size_cache
from bulletserve.engine.executor import CpuExecutor
from bulletserve.engine.kv_cache import KvCache
from bulletserve.engine.loaded import LoadedEngine
from bulletserve.engine.seats import SeatTable
from bulletserve.engine.step_runner import StepRunner
from bulletserve.formats.description import Checkpoint
from bulletserve.models.decoder import Decoder
from bulletserve.models.weights import load_state
from bulletserve.resources.cpu_threads import cpu_lattice, usable_cores

CPU_MAX_SEQS = 32
CPU_KV_BYTES = 2**30
CPU_KV_SHARE = 0.4
"""The cache takes at most this share of the memory that is available, and at most `CPU_KV_BYTES`."""

CPU_GROUP_TOKEN_LAYERS = 512
CPU_BATCH_TOKENS = 256
"""On a CPU a prefill of 256 tokens already reads each weight rarely enough; a layer of it takes about 15 ms."""

OPERATION_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
OPERATIONS_KEPT = "64"
"""oneDNN, and torch's layer above it, each keep what they made for an operation at a shape, 1024 of them if not told
otherwise: a prompt's count of rows brings five, so that prompts of all lengths grew an engine by a gigabyte. One cap
alone does little (docs/decisions/0021)."""


def choose_device(wanted: str) -> str:
    """The device to run on. Raises `ConfigError` for one that this version cannot drive."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and torch.version.cuda is None:
        raise ConfigError(
            "--device cuda needs an NVIDIA GPU with its driver, and a CUDA build of torch in place of this one for "
            f"CPUs: {CUDA_TORCH}; or use --device cpu"
        )
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no usable GPU (ask bullet doctor); or use --device cpu")
    return wanted


def choose_dtype(wanted: str) -> torch.dtype:
    """bfloat16 where the CPU multiplies it natively, else float32, unless one was asked for."""
    if wanted == "float16":
        raise ConfigError("float16 is slow and imprecise on a CPU: use --dtype bfloat16 or float32")
    if wanted != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[wanted]
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", None) or getattr(torch.cpu, "_is_amx_tile_supported", None)
    return torch.bfloat16 if native is not None and native() else torch.float32


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
    seats = SeatTable(size.max_seqs, -(-size.max_model_len // block_size) + 1, model.shape.vocab_size, device)
    return CpuExecutor(StepRunner(model, cache, seats), seats, lattice, poster)


def bound_operation_caches() -> None:
    """Tell oneDNN, and torch's layer above it, how much to keep. Of no effect after their first operation in a process;
    what the environment says wins."""
    for name in OPERATION_CACHES:
        os.environ.setdefault(name, OPERATIONS_KEPT)


def load_cpu_engine(config: EngineConfig, checkpoint: Checkpoint, poster: Poster) -> LoadedEngine:
    """Load a model onto all cores this process may use. Raises `ConfigError` or `ModelError` with the fix."""
    bound_operation_caches()
    dtype = choose_dtype(config.dtype)
    available = available_bytes()
    kv_bytes = int(min(CPU_KV_BYTES, CPU_KV_SHARE * available))
    max_seqs = config.max_num_seqs or CPU_MAX_SEQS
    size = size_cache(config, checkpoint.shape, dtype, kv_bytes, available, max_seqs)
    model = Decoder(checkpoint.shape, load_state(checkpoint, dtype, "cpu", config.seed), dtype, consume=True)
    executor = load_cpu_executor(model, size, config.block_size, poster)
    cores = executor.lattice.total_sms
    return LoadedEngine(
        executor=executor,
        size=size,
        device=f"CPU, {cores} core{'s' if cores > 1 else ''}",
        dtype=str(dtype).removeprefix("torch."),
        group_token_layers=CPU_GROUP_TOKEN_LAYERS,
        batch_tokens=CPU_BATCH_TOKENS,
        captured_rows=MAX_BATCH_TOKENS + size.max_seqs,
    )
