"""The whole way, from a socket through HTTP, transport, loop and policy to lanes made of arithmetic, in one process."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Self

import httpx

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.snapshot import Limits
from bulletserve.estimator.calibration import datasheet
from bulletserve.estimator.estimator import Estimator
from bulletserve.server.serve import HttpServer
from bulletserve.server.settings import ServerSettings
from bulletserve.server.text_codec import TextCodec
from bulletserve.simulated_engine import SimulatedEngine
from bulletserve.simulator.truth import Truth, Uncapped
from bulletserve.transport.front_end import FrontEnd
from tests.server.small_model import small_checkpoint
from tests.simulator.devices import LLAMA_8B

LIMITS = Limits(8, 16, 64, 16, 256, 128, Lattice.of_splits(4, (Partition(2, 2),)))
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SETTINGS = ServerSettings(("small",), port=0, grace_s=0.5)


class QuickTruth(Uncapped):
    """A device on which a step takes about a millisecond."""

    total_sms = 4

    def alone_s(self, step: StepShape, sms: int) -> float:
        tokens_s = 2e-5 * step.prefill_tokens + 1e-5 * step.decode_rows
        return step.layers / LIMITS.num_layers * (0.0002 + tokens_s) * 4 / sms

    def beside_s(self, step: StepShape, sms: int, other: StepShape, other_sms: int) -> float:
        return 1.1 * self.alone_s(step, sms)


class UnhurriedTruth(QuickTruth):
    """Sixty times slower, so that the clients are the quicker ones."""

    def alone_s(self, step: StepShape, sms: int) -> float:
        return 60 * super().alone_s(step, sms)


def forecasts() -> Estimator:
    """Of another device and model, as far off as can be: a policy must serve all the same."""
    calibration = datasheet("NVIDIA H200", 4)
    assert calibration is not None
    return Estimator(calibration, replace(LLAMA_8B, num_layers=LIMITS.num_layers))


class SimulatedServer:
    """Answers are runs of the alphabet: the letter of request r's token at position p is (r + p) modulo 26."""

    def __init__(
        self,
        policy: str,
        folder: Path,
        *,
        limits: Limits = LIMITS,
        truth: Truth | None = None,
        estimator: Estimator | None = None,
        max_model_len: int = 256,
        settings: ServerSettings = SETTINGS,
    ) -> None:
        self.codec = TextCodec.from_checkpoint(small_checkpoint(folder))
        letters = [self.codec.encode(letter)[0] for letter in LETTERS]
        self.front_end = FrontEnd()
        self.engine = SimulatedEngine(
            self.front_end.addresses,
            policy,
            limits,
            truth or QuickTruth(),
            estimator or forecasts(),
            lambda request_id, position: letters[(request_id + position) % len(letters)],
            vocab_size=self.codec.vocab_size,
            max_model_len=max_model_len,
        )
        self.server = HttpServer(self.front_end, self.front_end.wait_ready(10), self.codec, settings)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_idle(self, limit_s: float = 10) -> None:
        """Until the engine has no request: those that were aborted may still have a step in flight."""
        deadline_s = time.monotonic() + limit_s
        while not self.engine.state.is_idle:
            assert time.monotonic() < deadline_s, "requests are left"
            time.sleep(0.01)

    def close(self) -> None:
        self.http.close()
        self.wait_idle()
        self.front_end.stop()
        ended = self.engine.join(10)
        self.server.shutdown(0)
        self._thread.join(10)
        self.front_end.close()
        assert ended and not self._thread.is_alive()
        self.engine.state.ledger.check_integrity()
        assert self.engine.state.ledger.used_blocks == 0
