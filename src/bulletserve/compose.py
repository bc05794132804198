"""Wires the parts together, for the commands and for `LLM`. Holds no logic of its own.

One engine is one model with its weights, cache and lanes; any number of loops (one at a time) can drive it, which is
how policies are compared over the same weights.
"""

import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from llguidance import LLTokenizer

from bulletserve.core.config import EngineConfig
from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.errors import ConfigError
from bulletserve.core.ports import Clock, Outlet, Poster
from bulletserve.core.snapshot import Limits
from bulletserve.engine.load import choose_device, load_cpu_engine
from bulletserve.engine.loaded import DeviceExecutor, LoadedEngine
from bulletserve.estimator.estimator import Estimator
from bulletserve.forecasting import Forecasts, forecasts_for
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.formats.description import Checkpoint
from bulletserve.grammar.guide import GrammarGuide
from bulletserve.grammar.vocabulary import vocabulary
from bulletserve.machine import code_commit
from bulletserve.resources.cpu_threads import use_threads
from bulletserve.scheduler.inbox import MonotonicClock, QueueInbox
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.loop import Loop, Observer
from bulletserve.scheduler.policies import make_policy
from bulletserve.scheduler.policy import Policy
from bulletserve.scheduler.replay import RecordedEngine
from bulletserve.scheduler.state import State
from bulletserve.server.text_codec import TextCodec
from bulletserve.telemetry.recorder import Recorder
from bulletserve.version import __version__

_log = logging.getLogger(__name__)


@dataclass
class Engine:
    """A model ready to run steps. `inbox` is where its executor and its guide post and where requests are posted."""

    config: EngineConfig
    checkpoint: Checkpoint
    info: EngineInfo
    limits: Limits
    executor: DeviceExecutor
    policy: Policy
    inbox: QueueInbox
    guide: GrammarGuide
    clock: Clock = field(default_factory=MonotonicClock)
    forecasts: Forecasts | None = None

    def loop(self, outlet: Outlet, policy: Policy | None = None, observer: Observer | None = None) -> Loop:
        """A fresh loop with an empty cache. The one before it must have ended with nothing in flight.

        Forecasts are looked for when the first loop is made; a policy that cannot do without them may have this CPU
        measured for some seconds then. `info` says which they are.
        """
        ledger = KvLedger(self.limits.total_blocks + 1, self.limits.block_size, self.config.enable_prefix_caching)
        policy = policy or self.policy
        estimator = self.find_forecasts(needed=policy.needs_forecasts)
        state = State(self.limits, ledger, policy.rules, estimator, self.guide)
        return Loop(state, policy, self.executor, self.inbox, self.clock, outlet, observer)

    def close(self) -> None:
        """End the lanes and the guide."""
        self.guide.close()
        self.executor.close()

    def find_forecasts(self, *, needed: bool) -> Estimator | None:
        """What to plan with, looked for once; with nothing in flight. `needed`: a CPU may be measured for it."""
        if self.forecasts is None or (needed and self.forecasts.estimator is None):
            self.forecasts = forecasts_for(self, needed=needed)
            if self.forecasts.note:
                self.info = replace(self.info, notes=(*self.info.notes, self.forecasts.note))
        return self.forecasts.estimator


def build_engine(config: EngineConfig, inbox: QueueInbox | None = None) -> Engine:
    """Load a model; its events go to `inbox`, a new one by default.

    Raises `ConfigError` or `ModelError` with the fix in the message.
    """
    policy = make_policy(config.policy)
    device = choose_device(config.device)
    config.check_device(device)
    if device == "cpu":
        use_threads(1)  # before any operation: the wide lane's OpenMP team must be the only one of the process
    checkpoint = open_checkpoint(config.model, config.load_format)
    inbox = inbox or QueueInbox()
    loaded = _load(device, config, checkpoint, inbox)
    size = loaded.size
    info = EngineInfo(
        model_name=checkpoint.name,
        vocab_size=checkpoint.shape.vocab_size,
        max_model_len=size.max_model_len,
        block_size=config.block_size,
        total_blocks=size.total_blocks,
        max_seqs=size.max_seqs,
        policy=config.policy,
        device=loaded.device,
        dtype=loaded.dtype,
        prefix_caching=config.enable_prefix_caching,
        notes=loaded.notes,
    )
    limits = Limits(
        num_layers=checkpoint.shape.num_layers,
        block_size=config.block_size,
        total_blocks=size.total_blocks,
        max_seqs=size.max_seqs,
        group_token_layers=loaded.group_token_layers,
        batch_tokens=loaded.batch_tokens,
        lattice=loaded.executor.lattice,
        one_group_tokens=loaded.graph_tokens,
        captured_rows=loaded.captured_rows,
    )
    _log.debug("%s", info.describe())
    return Engine(config, checkpoint, info, limits, loaded.executor, policy, inbox, make_guide(checkpoint, inbox))


def make_guide(checkpoint: Checkpoint, poster: Poster) -> GrammarGuide:
    """What follows grammars over the checkpoint's tokens, once somebody asks for one."""

    def tokens() -> LLTokenizer:
        codec = TextCodec.from_checkpoint(checkpoint)
        return vocabulary(
            codec.tokenizer.all_pieces,
            codec.tokenizer.special_ids,
            codec.eos_ids,
            checkpoint.shape.vocab_size,
            lambda text: codec.encode(text, add_special_tokens=False),
        )

    return GrammarGuide(poster, tokens)


def record_to(path: Path, engine: Engine, loop: Loop, policy: str = "", **origin: str | float) -> Recorder:
    """What writes down all that `loop` decides: set it as the loop's observer. Raises `ConfigError`.

    `policy`: the loop's, where it is not the one of the engine's config; `origin`: more about where the run comes from.
    """
    known = loop.state.estimator
    estimator = known if isinstance(known, Estimator) else None
    recorded = RecordedEngine(
        policy or engine.config.policy, engine.limits, engine.config.enable_prefix_caching, estimator
    )
    header = {
        "origin": {"from": "serve", "model": engine.info.model_name, "device": engine.info.device} | origin,
        "config": asdict(engine.config),
        "seed": engine.config.seed,
        "version": __version__,
        "commit": code_commit(),
    }
    return Recorder(path, recorded.header(**header))


def _load(device: str, config: EngineConfig, checkpoint: Checkpoint, poster: Poster) -> LoadedEngine:
    if device == "cpu":
        return load_cpu_engine(config, checkpoint, poster)
    try:
        from bulletserve.engine.cuda.load import load_cuda_engine  # needs Triton, which a CPU does not
    except ImportError as error:
        raise ConfigError(
            f"a package that the GPU needs cannot be imported ({error}): pip install 'bulletserve[cuda]', or use "
            "--device cpu"
        ) from error
    return load_cuda_engine(config, checkpoint, poster)
