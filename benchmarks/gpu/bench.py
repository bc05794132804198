"""The loaded engine that all scripts share: Llama-3.1-8B's shapes, random weights, a cache full of random numbers.

Knows nothing about what is measured.
"""

import gc
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.gpu.report import Report

from bulletserve.calibrations import find_calibration
from bulletserve.core.config import EngineConfig
from bulletserve.core.plan import Lane
from bulletserve.core.shapes import ModelShape, RopeScaling
from bulletserve.core.snapshot import Limits
from bulletserve.engine.cuda.executor import CudaExecutor
from bulletserve.engine.cuda.load import load_cuda_engine
from bulletserve.engine.loaded import LoadedEngine
from bulletserve.estimator.estimator import Estimator
from bulletserve.formats.description import Checkpoint
from bulletserve.profiling.cache_contents import fill_cache
from bulletserve.profiling.driver import Driver
from bulletserve.profiling.engine_sources import EngineSources
from bulletserve.profiling.meter import Meter
from bulletserve.profiling.sources import BlockPool, DecodeRows, MixedChunks, Prompts
from bulletserve.scheduler.inbox import QueueInbox

LLAMA_8B = ModelShape(
    "llama",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_context=131072,
    rope_theta=500000.0,
    rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
)
MAX_ROWS = 256
PROMPT_ROWS = 8
"""Seats for prompts beside a full decode batch."""


@dataclass
class Bench:
    """An engine with idle lanes, and what drives it. `until_s`: when the process should be done (monotonic)."""

    loaded: LoadedEngine
    executor: CudaExecutor
    inbox: QueueInbox
    driver: Driver
    shape: ModelShape
    block_size: int
    options: Namespace
    out: Path
    until_s: float

    @property
    def total_sms(self) -> int:
        """All SMs of the card."""
        return self.executor.lattice.total_sms

    @property
    def time_left_s(self) -> float:
        """Until the process should be done."""
        return self.until_s - time.monotonic()

    def report(self, script: str) -> Report:
        """An empty report of a script."""
        return Report(f"gpu_{script}", self.out)

    def stream(self, lane: Lane, sms: int) -> torch.cuda.Stream:
        """A lane's stream on a share."""
        return self.executor._manager.stream(lane, sms)

    @property
    def sources(self) -> EngineSources:
        """Makes work for the lanes."""
        return EngineSources(self.limits(MAX_ROWS + PROMPT_ROWS), self.shape.vocab_size)

    def pool(self) -> BlockPool:
        """All blocks, for one scenario."""
        return self.sources.pool()

    def decode(self, rows: int, context: int, sms: int, pool: BlockPool) -> DecodeRows:
        """Decode steps of `rows` rows whose mean context is `context` tokens."""
        return self.sources.decode(rows, context, sms, pool)

    def prompts(self, tokens: int, sms: int, pool: BlockPool, *, first_seat: int = 0, cut: int = 0) -> Prompts:
        """Prompts of `tokens` tokens in layer groups as the scheduler would make them."""
        return self.sources.prompts(tokens, sms, pool, first_seat=first_seat, cut=cut)

    def mixed(self, decode: DecodeRows, prompt_tokens: int, chunk: int, pool: BlockPool) -> MixedChunks:
        """Mixed steps: `chunk` tokens of prompts of `prompt_tokens` tokens, and all rows of `decode`."""
        return self.sources.mixed(decode, prompt_tokens, chunk, pool)

    def limits(self, max_seqs: int) -> Limits:
        """What a scheduler over this engine goes by, with `max_seqs` requests at once."""
        loaded = self.loaded
        return Limits(
            num_layers=self.shape.num_layers,
            block_size=self.block_size,
            total_blocks=loaded.size.total_blocks,
            max_seqs=max_seqs,
            group_token_layers=loaded.group_token_layers,
            batch_tokens=loaded.batch_tokens,
            lattice=loaded.executor.lattice,
            one_group_tokens=loaded.graph_tokens,
            captured_rows=loaded.captured_rows,
        )

    def estimator(self) -> Estimator:
        """Forecasts by the calibration that serve would find."""
        found = find_calibration(torch.cuda.get_device_name(), self.total_sms, self.shape, "bfloat16")
        if found.calibration is None:
            raise RuntimeError(f"no forecasts: {found.source}")
        made, limits = Estimator(found.calibration, self.shape), self.limits(MAX_ROWS)
        made.prepare(limits.lattice, limits.max_seqs, limits.batch_tokens)
        return made

    def close(self) -> None:
        """End the lanes."""
        self.executor.close()


def start_bench(options: Namespace, out: Path, until_s: float) -> Bench:
    """Load the engine, fill its cache, and record how long the start took."""
    inbox = QueueInbox()
    config = EngineConfig(
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        max_model_len=16384,
        max_num_seqs=MAX_ROWS + PROMPT_ROWS,
        enable_prefix_caching=False,
    )
    began_s = time.monotonic()
    loaded = load_cuda_engine(config, Checkpoint("llama-3.1-8b", LLAMA_8B, "bfloat16"), inbox)
    ready_s = time.monotonic() - began_s
    print(*loaded.notes, sep="\n")
    report = Report("gpu_start", out)
    report.add(start_ready_s=ready_s, cache_tokens=loaded.size.total_blocks * config.block_size)
    report.line("start to ready, s", ready_s)
    executor = loaded.executor
    if not isinstance(executor, CudaExecutor):
        raise SystemExit("this is no GPU engine")
    fill_cache(executor.cache.layers)
    gc.collect()
    gc.freeze()  # as the engine process does
    driver = Driver(executor, inbox, Meter())
    return Bench(loaded, executor, inbox, driver, LLAMA_8B, config.block_size, options, out, until_s)
