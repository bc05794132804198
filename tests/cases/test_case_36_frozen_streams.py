"""Case 36: decoding streams freeze when a long prompt arrives. Over the simulated H200; the card itself is measured by
benchmarks/gpu and `bullet compare`."""

import time
from itertools import pairwise
from pathlib import Path

import pytest

from bulletserve.core.slo import Slo
from bulletserve.scheduler.policies import make_policy
from bulletserve.simulator.run import simulate
from bulletserve.workload.request_list import RequestLengths
from tests.cases.h200_server import h200, h200_server
from tests.cases.live_streams import LiveStream

SLO = {"ttft_ms": 10_000, "tpot_ms": 20}


def gaps_beside_a_long_prompt(policy: str, folder: Path) -> tuple[list[float], float]:
    """The longest gap of each of 16 streams from the arrival of a prompt of 32,000 tokens until after its first token,
    and the time to that token; seconds."""
    with h200_server(policy, folder) as server:
        streams = [LiveStream(server.url, prompt=[5 + n] * 50, max_tokens=9_000, slo=SLO) for n in range(16)]
        for stream in streams:
            stream.wait_begun()
        newcomer = LiveStream(server.url, prompt=[9] * 32_000, max_tokens=2, slo=SLO).wait_begun()
        time.sleep(0.1)
        for stream in streams:
            stream.leave()
        from_s, to_s = newcomer.sent_s, newcomer.join().times_s[0] + 0.1
        return [max(stream.gaps_s(from_s, to_s)) for stream in streams], newcomer.ttft_s


@pytest.mark.slow
def test_case_36_no_stream_freezes(tmp_path: Path) -> None:
    """Idle gaps are 6 to 8 ms here. With bullet the longest was 20 ms, the prompt's own time 1.5 s; where prefill and
    decode take turns the same measurement shows the whole prompt as a gap. The bounds leave room for a busy machine."""
    shared, ttft_s = gaps_beside_a_long_prompt("bullet", tmp_path)
    (tmp_path / "turns").mkdir()
    turns, turns_ttft_s = gaps_beside_a_long_prompt("time_sliced", tmp_path / "turns")
    assert min(turns) > 0.5 * turns_ttft_s
    assert max(shared) < 0.4 * min(turns)
    assert ttft_s < 2 * turns_ttft_s


def in_virtual_time(policy: str, prompt_tokens: int) -> tuple[float, float, float]:
    """16 streams, and a prompt that comes after 2 s: the longest gap of any stream before it, the longest from its
    arrival until half a second after its first token, and the time to that; seconds."""
    setup = h200()
    requests = [RequestLengths(0.0, 50, 2000) for _ in range(16)] + [RequestLengths(2.0, prompt_tokens, 2)]
    slo = Slo("chat", 60.0, 0.02)
    run = simulate(requests, setup.limits, make_policy(policy), setup.truth(3), slo, setup.estimator)
    answers = [run.collector.answers[number] for number in range(17)]
    assert all(answer.ended_well for answer in answers)
    *streams, newcomer = answers
    ttft_s = newcomer.ttft_s
    before, during = [], []
    for stream in streams:
        assert stream.token_times_s[-1] > 2.0 + ttft_s + 0.5, "the streams must outlast it"
        for begin_s, end_s in pairwise(stream.token_times_s):
            if begin_s > 0.5 and end_s < 2.0:
                before.append(end_s - begin_s)
            elif end_s > 2.0 and begin_s < 2.0 + ttft_s + 0.5:
                during.append(end_s - begin_s)
    return max(before), max(during), ttft_s


@pytest.mark.parametrize("prompt_tokens", [32_000, 100_000])
def test_case_36_gaps_are_a_small_multiple_of_idle_ones(prompt_tokens: int) -> None:
    """Beside the same device under the budget that vLLM has by default, and under a small one. Measured, ms: idle 5.6;
    bullet 18 and 19, budget 2048 114 and 273, budget 256 19 and 41; TTFT in s: 1.4 and 9.5, 1.3 and 7.9, 1.8 and 10.2.
    """
    idle_s, longest_s, ttft_s = in_virtual_time("bullet", prompt_tokens)
    _, usual_s, usual_ttft_s = in_virtual_time("chunked_prefill:budget=2048", prompt_tokens)
    _, best_s, best_ttft_s = in_virtual_time("chunked_prefill:budget=256", prompt_tokens)
    print(
        f"{prompt_tokens}: idle {idle_s:.4f}, bullet {longest_s:.4f} ({ttft_s:.2f}), budget 2048 {usual_s:.4f} "
        f"({usual_ttft_s:.2f}), 256 {best_s:.4f} ({best_ttft_s:.2f})"
    )
    assert longest_s < 4 * idle_s
    assert longest_s < 0.5 * usual_s and ttft_s < 1.5 * usual_ttft_s
    assert ttft_s < best_ttft_s
