"""Case 34: one long prompt holds up every short request behind it. Over the simulated H200."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from bulletserve.core.operators import StepShape
from tests.cases.h200_server import h200_server
from tests.cases.live_streams import LiveStream
from tests.simulated_server import LIMITS, QuickTruth, SimulatedServer

SLO = {"ttft_ms": 500, "ttft_ms_per_prompt_token": 0.05, "tpot_ms": 40}


class UnhurriedTruth(QuickTruth):
    """Sixty times slower, so that the clients are the quicker ones."""

    def alone_s(self, step: StepShape, sms: int) -> float:
        return 60 * super().alone_s(step, sms)


@pytest.mark.slow
def test_case_34_short_requests_overtake(tmp_path: Path) -> None:
    """A prompt of 60,000 tokens at t = 0, then short ones all the time until it has its first token."""
    with h200_server("bullet", tmp_path) as server:
        alone = LiveStream(server.url, prompt=[5] * 60_000, max_tokens=2, slo=SLO).wait_begun().join()
        long = LiveStream(server.url, prompt=[6] * 60_000, max_tokens=2, slo=SLO)
        time.sleep(0.1)
        short: list[LiveStream] = []
        while not long.times_s:
            short.append(LiveStream(server.url, prompt=[7 + len(short) % 100] * 50, max_tokens=3, slo=SLO))
            time.sleep(0.04)
        waits_s = [stream.join().ttft_s for stream in short]
        assert len(waits_s) >= 20
        assert max(waits_s) < 0.3 * alone.ttft_s  # some steps, not the rest of the prompt
        assert long.join().ttft_s < 2 * alone.ttft_s  # and nobody starves


@pytest.mark.parametrize("policy", ["bullet", "static_split", "chunked_prefill", "time_sliced"])
def test_case_34_what_does_not_fit_lets_others_pass(policy: str, tmp_path: Path) -> None:
    """The cache holds 256 tokens. One request uses 8 blocks of 16, the next wants 13, the last one 2."""
    limits = replace(LIMITS, total_blocks=16)
    with SimulatedServer(policy, tmp_path, limits=limits, truth=UnhurriedTruth()) as server:
        first = LiveStream(server.url, prompt=[5] * 100, max_tokens=80).wait_begun()
        large = LiveStream(server.url, prompt=[6] * 200, max_tokens=2)
        while len(server.server.open_requests) < 2:
            time.sleep(0.002)
        small = LiveStream(server.url, prompt=[7] * 20, max_tokens=2).join()
        assert len(first.times_s) < 80 and not large.times_s
        first.leave()
        assert small.times_s[0] < large.join().times_s[0]
