"""A whole engine whose device is arithmetic, behind the transport that a real one has: for tests and measurements of
servers where there is no GPU, and where the model's answer does not matter.

Knows nothing about HTTP. Everything that decides is the code that serves; steps take the time that a `Truth` says, on
the wall clock, and tokens are made up: also those of structured answers, which keep to no grammar but ride as they do.
"""

import threading

from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.snapshot import Limits
from bulletserve.estimator.estimator import Estimator
from bulletserve.scheduler.inbox import MonotonicClock, QueueInbox
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.loop import Loop, Observer
from bulletserve.scheduler.policies import make_policy
from bulletserve.scheduler.state import State
from bulletserve.simulator.device import SimulatedDevice, TokenOf
from bulletserve.simulator.executor import RealtimeExecutor
from bulletserve.simulator.guide import AllowingGuide
from bulletserve.simulator.truth import Truth
from bulletserve.transport.addresses import Addresses
from bulletserve.transport.engine_end import EngineEnd


class SimulatedEngine:
    """Connects to a front that listens at `addresses`, says that it is ready and runs on threads of its own.

    policy: as `--policy` takes it; estimator: what it plans with. token_of: (request id, tokens before it) -> token id.
    `device` may be changed between steps, as tests of delays do.
    """

    def __init__(
        self,
        addresses: Addresses,
        policy: str,
        limits: Limits,
        truth: Truth,
        estimator: Estimator | None,
        token_of: TokenOf,
        *,
        vocab_size: int,
        max_model_len: int,
        name: str = "simulated",
        observer: Observer | None = None,
    ) -> None:
        inbox = QueueInbox()
        self._end = EngineEnd(addresses, inbox, block_size=limits.block_size)
        self.device = SimulatedDevice(truth, limits.num_layers, token_of)
        self._executor = RealtimeExecutor(self.device, limits.lattice, inbox)
        made = make_policy(policy)
        ledger = KvLedger(limits.total_blocks + 1, limits.block_size)
        self.state = State(limits, ledger, made.rules, estimator, AllowingGuide(inbox))
        self._loop = Loop(self.state, made, self._executor, inbox, MonotonicClock(), self._end, observer)
        self._end.ready(
            EngineInfo(
                model_name=name,
                vocab_size=vocab_size,
                max_model_len=max_model_len,
                block_size=limits.block_size,
                total_blocks=limits.total_blocks,
                max_seqs=limits.max_seqs,
                policy=policy,
                device="simulated",
                dtype="none",
                prefix_caching=True,
            )
        )
        self._thread = threading.Thread(target=self._run, name="simulated-loop", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the front has told it to stop; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop.run()
        finally:
            self._executor.close()
            self._end.close()
