"""Case 39: decode reads what the prefill lane has not finished writing.

Many short prompts finish prefill and join decode at random moments, sampling of every kind in one batch, under random
delays on either lane. The outputs are those of one request at a time, and no token of one appears in another. The GPU's
lanes have the same tests in tests/engine/cuda and tests/gpu.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bulletserve.core.launch import Launch
from bulletserve.core.plan import Lane
from tests.cases.small_server import body_of, small_server
from tests.engine.small_engine import random_requests


@pytest.mark.parametrize(
    ("policy", "slow", "total_blocks"),
    [
        ("static_split", (Lane.PREFILL,), 200),
        ("static_split", (Lane.DECODE,), 60),
        ("chunked_prefill:budget=20", (Lane.PREFILL, Lane.DECODE), 60),
    ],
)
def test_case_39_outputs_equal_a_serial_run(
    policy: str, slow: tuple[Lane, ...], total_blocks: int, tmp_path: Path
) -> None:
    rng = random.Random(39)
    requests = random_requests(40, 39)

    def delay(launch: Launch) -> None:
        if launch.lane in slow and rng.random() < 0.3:
            time.sleep(rng.random() * 3e-3)

    with small_server(policy, tmp_path, total_blocks=total_blocks, delay=delay) as server:

        def answer(body: dict[str, object]) -> tuple[str, int]:
            time.sleep(rng.random() * 0.2)
            document = server.http.post("/v1/completions", json=body).json()
            return document["choices"][0]["text"], document["usage"]["completion_tokens"]

        with ThreadPoolExecutor(20) as clients:
            answers = list(clients.map(answer, map(body_of, requests)))
        assert [text for text, _ in answers] == [server.serial_text(one) for one in requests]
        assert all(0 < tokens <= one.max_tokens for (_, tokens), one in zip(answers, requests, strict=True))
