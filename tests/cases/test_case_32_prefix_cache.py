"""Case 32: a prefix that is in the cache makes an answer come sooner, and never another one.

In float64 there are no near ties (see case 33), so every answer must be that of the plain computation from an empty
cache, and `usage` says how much of the prompt was found.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bulletserve.core.request import Request
from tests.cases.small_server import SmallServer, body_of, small_server
from tests.engine.small_engine import BLOCK_SIZE

BLOCKS = 40
LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 10 * BLOCK_SIZE, 10 * BLOCK_SIZE + 3]


@pytest.fixture(scope="module", params=["static_split", "chunked_prefill:budget=20"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    with small_server(request.param, tmp_path_factory.mktemp("model"), total_blocks=BLOCKS) as made:
        yield made


def asking(length: int, first: int) -> Request:
    return Request(0, [(first + 7 * n * n) % 200 for n in range(length)], 12, 0.0)


def ask(server: SmallServer, request: Request, **more: object) -> dict[str, Any]:
    answer: dict[str, Any] = server.http.post("/v1/completions", json=body_of(request) | more).json()
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_case_32_cold_warm_and_evicted_answers_are_the_same(server: SmallServer) -> None:
    for first, length in enumerate(LENGTHS):
        request = asking(length, first)
        expected = server.serial_text(request)
        cold, warm = ask(server, request), ask(server, request)
        assert cold["choices"][0]["text"] == warm["choices"][0]["text"] == expected
        assert cached(cold) == 0
        # one token at least is left to compute, also of a prompt of whole blocks: its answer begins with it
        assert cached(warm) == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        ask(server, asking(BLOCKS * BLOCK_SIZE - 12, 100 + first))  # takes the whole cache
        evicted = ask(server, request)
        assert cached(evicted) == 0
        assert evicted["choices"][0]["text"] == expected


def test_case_32_answers_become_prefixes_too(server: SmallServer) -> None:
    """The next turn of a chat: the prompt and its answer are in the cache."""
    request = asking(30, 11)
    answer = ask(server, request)
    again = ask(server, request, max_tokens=1)
    assert cached(again) == 28 and again["choices"][0]["text"] == answer["choices"][0]["text"][:1]


def test_case_32_answers_that_were_cut_leave_no_half_filled_block(server: SmallServer) -> None:
    """By a stop string, which the engine hears of late, and by clients that leave at any moment."""
    request = asking(33, 17)
    expected = server.serial_text(request)
    for cut in range(1, 6):
        stopped = ask(server, request, stop=expected[cut : cut + 1])
        assert expected.startswith(stopped["choices"][0]["text"])
        body = body_of(request) | {"stream": True, "max_tokens": 100}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            for _ in zip(range(cut), stream.iter_lines(), strict=False):
                pass
        assert ask(server, request)["choices"][0]["text"] == expected


def test_case_32_nobody_gets_anothers_prefix(server: SmallServer) -> None:
    """Neither one that begins alike, nor an equal one under another salt."""
    request = asking(40, 23)
    ask(server, request)
    other = Request(0, [*request.prompt_ids[:21], 199, *request.prompt_ids[22:]], 12, 0.0)
    answer = ask(server, other)
    assert cached(answer) == 20
    assert answer["choices"][0]["text"] == server.serial_text(other)
    assert cached(ask(server, request, cache_salt="mine")) == 0
    assert cached(ask(server, request, cache_salt="mine")) == 36


def test_case_32_without_the_cache_all_is_the_same(tmp_path: Path) -> None:
    """The reference: more room than all prompts need, each of them new."""
    with small_server("time_sliced", tmp_path) as server:
        for first, length in enumerate(LENGTHS):
            request = asking(length, first)
            answer = ask(server, request, cache_salt=f"salt {first}")
            assert cached(answer) == 0
            assert answer["choices"][0]["text"] == server.serial_text(request)
