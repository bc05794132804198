"""Wires the parts together, for the commands and for `LLM`. Holds no logic of its own.

One engine is one model with its weights, cache and lanes; any number of loops (one at a time) can drive it, which is
how policies are compared over the same weights.
"""

import logging
from dataclasses import dataclass, field

from bulletserve.core.config import EngineConfig
from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.ports import Clock, Outlet
from bulletserve.core.snapshot import Limits
from bulletserve.engine.executor import CpuExecutor
from bulletserve.engine.load import (
    CPU_KV_BYTES,
    CPU_KV_SHARE,
    available_bytes,
    choose_device,
    choose_dtype,
    load_cpu_executor,
    size_cache,
)
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.formats.description import Checkpoint
from bulletserve.models.decoder import Decoder
from bulletserve.models.weights import load_state
from bulletserve.resources.cpu_threads import use_threads
from bulletserve.scheduler.inbox import MonotonicClock, QueueInbox
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.loop import Loop, Observer
from bulletserve.scheduler.policies import make_policy
from bulletserve.scheduler.policy import Policy
from bulletserve.scheduler.state import State

_log = logging.getLogger(__name__)

CPU_GROUP_TOKEN_LAYERS = 512
CPU_BATCH_TOKENS = 256
"""On a CPU a prefill of 256 tokens already reads each weight rarely enough; a layer of it takes about 15 ms."""


@dataclass
class Engine:
    """A model ready to run steps. `inbox` is where its executor posts and where requests are posted."""

    config: EngineConfig
    checkpoint: Checkpoint
    info: EngineInfo
    limits: Limits
    executor: CpuExecutor
    policy: Policy
    inbox: QueueInbox
    clock: Clock = field(default_factory=MonotonicClock)

    def loop(self, outlet: Outlet, policy: Policy | None = None, observer: Observer | None = None) -> Loop:
        """A fresh loop with an empty cache. The one before it must have ended with nothing in flight."""
        ledger = KvLedger(self.limits.total_blocks + 1, self.limits.block_size, self.config.enable_prefix_caching)
        state = State(self.limits, ledger)
        return Loop(state, policy or self.policy, self.executor, self.inbox, self.clock, outlet, observer)

    def close(self) -> None:
        """End the lanes."""
        self.executor.close()


def build_engine(config: EngineConfig, inbox: QueueInbox | None = None) -> Engine:
    """Load a model; its events go to `inbox`, a new one by default.

    Raises `ConfigError` or `ModelError` with the fix in the message.
    """
    policy = make_policy(config.policy)
    use_threads(1)  # before any operation: the wide lane's OpenMP team must be the only one of the process
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype)
    checkpoint = open_checkpoint(config.model, config.load_format)
    available = available_bytes()
    kv_bytes = int(min(CPU_KV_BYTES, CPU_KV_SHARE * available))
    size = size_cache(config, checkpoint.shape, dtype, kv_bytes, available)
    state = load_state(checkpoint, dtype, device, config.seed)
    model = Decoder(checkpoint.shape, state, dtype, consume=True)
    inbox = inbox or QueueInbox()
    executor = load_cpu_executor(model, size, config.block_size, inbox)
    cores = executor.lattice.total_sms
    info = EngineInfo(
        model_name=checkpoint.name,
        vocab_size=checkpoint.shape.vocab_size,
        max_model_len=size.max_model_len,
        block_size=config.block_size,
        total_blocks=size.total_blocks,
        max_seqs=size.max_seqs,
        policy=config.policy,
        device=f"CPU, {cores} core{'s' if cores > 1 else ''}",
        dtype=str(dtype).removeprefix("torch."),
        prefix_caching=config.enable_prefix_caching,
    )
    limits = Limits(
        num_layers=checkpoint.shape.num_layers,
        block_size=config.block_size,
        total_blocks=size.total_blocks,
        max_seqs=size.max_seqs,
        group_token_layers=CPU_GROUP_TOKEN_LAYERS,
        batch_tokens=CPU_BATCH_TOKENS,
        lattice=executor.lattice,
    )
    _log.debug("%s", info.describe())
    return Engine(config, checkpoint, info, limits, executor, policy, inbox)
