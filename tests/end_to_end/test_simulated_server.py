"""The whole way, from a client's socket through HTTP, transport, loop and policy to lanes made of arithmetic."""

import concurrent.futures
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import httpx
import openai
import pytest

from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.snapshot import Limits
from bulletserve.estimator.calibration import datasheet
from bulletserve.estimator.estimator import Estimator
from bulletserve.scheduler.inbox import MonotonicClock, QueueInbox
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.loop import Loop
from bulletserve.scheduler.policies import POLICIES, make_policy
from bulletserve.scheduler.state import State
from bulletserve.server.serve import HttpServer
from bulletserve.server.settings import ServerSettings
from bulletserve.server.text_codec import TextCodec
from bulletserve.simulator.device import SimulatedDevice
from bulletserve.simulator.executor import RealtimeExecutor
from bulletserve.simulator.truth import Pace
from bulletserve.transport.engine_end import EngineEnd
from bulletserve.transport.front_end import FrontEnd
from tests.server.small_model import small_checkpoint
from tests.simulator.devices import LLAMA_8B

LIMITS = Limits(8, 16, 64, 16, 256, 128, Lattice.of_splits(4, (Partition(2, 2),)))
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class QuickTruth:
    """A device on which a step takes about a millisecond."""

    total_sms = 4
    idle_w, power_cap_w = 0.0, inf

    def alone(self, step: StepShape, sms: int) -> Pace:
        return self._pace(step, sms, 1.0)

    def beside(self, step: StepShape, sms: int, other: StepShape, other_sms: int) -> Pace:
        return self._pace(step, sms, 1.1)

    def _pace(self, step: StepShape, sms: int, factor: float) -> Pace:
        tokens_s = 2e-5 * step.prefill_tokens + 1e-5 * step.decode_rows
        seconds = factor * step.layers / LIMITS.num_layers * (0.0002 + tokens_s) * 4 / sms
        return Pace(seconds, seconds, 0.0)


def forecasts() -> Estimator:
    """Of another device and model, as far off as can be: a policy must serve all the same."""
    calibration = datasheet("NVIDIA H200", 4)
    assert calibration is not None
    return Estimator(calibration, replace(LLAMA_8B, num_layers=LIMITS.num_layers))


class SimulatedServer:
    def __init__(self, policy: str, folder: Path) -> None:
        checkpoint = small_checkpoint(folder)
        self.codec = TextCodec.from_checkpoint(checkpoint)
        letters = [self.codec.encode(letter)[0] for letter in LETTERS]

        def token_of(request_id: int, position: int) -> int:
            return letters[(request_id + position) % len(letters)]

        front_end = FrontEnd()
        inbox = QueueInbox()
        end = EngineEnd(front_end.addresses, inbox, block_size=LIMITS.block_size)
        device = SimulatedDevice(QuickTruth(), LIMITS.num_layers, token_of)
        self.executor = RealtimeExecutor(device, LIMITS.lattice, inbox)
        made = make_policy(policy)
        self.state = State(LIMITS, KvLedger(LIMITS.total_blocks + 1, LIMITS.block_size), made.rules, forecasts())
        loop = Loop(self.state, made, self.executor, inbox, MonotonicClock(), end)
        info = EngineInfo("small", 300, 256, LIMITS.block_size, LIMITS.total_blocks, 16, policy, "sim", "none", True)
        end.ready(info)

        def run() -> None:
            loop.run()
            end.close()

        self.loop_thread = threading.Thread(target=run, daemon=True)
        self.loop_thread.start()
        self.front_end = front_end
        settings = ServerSettings(("small",), port=0, grace_s=0.5)
        self.server = HttpServer(front_end, front_end.wait_ready(10), self.codec, settings)
        self.server_thread = threading.Thread(target=self.server.run, daemon=True)
        self.server_thread.start()
        self.url = f"http://127.0.0.1:{self.server.port}"

    def close(self) -> None:
        deadline_s = time.monotonic() + 10
        while not self.state.is_idle:  # aborted requests may still have a step in flight
            assert time.monotonic() < deadline_s, "requests are left"
            time.sleep(0.01)
        self.front_end.stop()
        self.loop_thread.join(10)
        self.server.shutdown(0)
        self.server_thread.join(10)
        self.executor.close()
        self.front_end.close()
        assert not self.loop_thread.is_alive() and not self.server_thread.is_alive()
        self.state.ledger.check_integrity()
        assert self.state.ledger.used_blocks == 0


@pytest.fixture(params=sorted(POLICIES))
def simulated(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SimulatedServer]:
    server = SimulatedServer(request.param, tmp_path)
    yield server
    server.close()


def test_many_clients_each_get_their_own_answer(simulated: SimulatedServer) -> None:
    """40 streams at once, more than seats; every answer is a run of the alphabet of the wanted length."""

    def ask(number: int) -> str:
        with openai.OpenAI(base_url=f"{simulated.url}/v1", api_key="none", max_retries=0) as client:
            prompt = LETTERS * (1 + number % 7)
            with client.completions.create(model="small", prompt=prompt, max_tokens=20 + number % 30, stream=True) as s:
                return "".join(chunk.choices[0].text for chunk in s)

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(40)))
    alphabet = LETTERS * 4
    for number, answer in enumerate(answers):
        assert len(answer) == 20 + number % 30
        assert answer in alphabet
    with httpx.Client(base_url=simulated.url) as http:
        assert http.get("/health").status_code == 200


def test_clients_that_vanish_leave_nothing_behind(simulated: SimulatedServer) -> None:
    with httpx.Client(base_url=simulated.url, timeout=20) as http:
        for _ in range(12):
            body = {"prompt": LETTERS, "max_tokens": 200, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        answer = http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 5})
        assert answer.json()["usage"]["completion_tokens"] == 5


def test_a_stop_string_ends_the_request_in_the_engine(simulated: SimulatedServer) -> None:
    with httpx.Client(base_url=simulated.url, timeout=20) as http:
        answer = http.post("/v1/completions", json={"prompt": LETTERS, "max_tokens": 200, "stop": "xyz"}).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "xyz"
    assert choice["text"] in LETTERS * 2 and "xyz" not in choice["text"]
    assert answer["usage"]["completion_tokens"] == len(choice["text"]) + 3
