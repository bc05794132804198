"""Case 33: the same greedy request, another answer when the server is busy.

In float64 no sum is close enough to another for the order of additions to decide: every difference would be a fault.
On a GPU in bfloat16 near ties differ; tests/gpu measures how often.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cases.small_server import body_of, small_server
from tests.engine.small_engine import random_requests


@pytest.mark.parametrize("policy", ["static_split", "chunked_prefill:budget=20"])
def test_case_33_a_busy_server_says_the_same(policy: str, tmp_path: Path) -> None:
    asked = [body_of(one) for one in random_requests(6, 33, sampled=False)]
    neighbours = [body_of(one) | {"prompt": [7 + n] * 120} for n, one in enumerate(random_requests(12, 34))]
    with small_server(policy, tmp_path) as server:

        def answer(body: dict[str, object]) -> str:
            return str(server.http.post("/v1/completions", json=body).json()["choices"][0]["text"])

        alone = [[answer(body) for body in asked] for _ in range(2)]
        assert alone[0] == alone[1]
        with ThreadPoolExecutor(len(asked) + len(neighbours)) as clients:
            noise = [clients.submit(answer, body) for body in neighbours]
            busy = list(clients.map(answer, asked))
            assert all(one.result() is not None for one in noise)
    assert busy == alone[0]
