"""Case 27: with more requests than fit, each is answered: some late, some refused at once with a time to come back."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import httpx
import pytest

from tests.cases.live_streams import LiveStream
from tests.cases.scripted_server import serving
from tests.server.conftest import Served
from tests.simulated_server import LIMITS, SimulatedServer, UnhurriedTruth

OFFERED, LIMIT, SEATS = 1000, 32, 8


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("model"), max_waiting=LIMIT) as server:
        server.say("hello")
        server.engine.seats = SEATS
        server.engine.pause_s = 0.01
        yield server


async def storm(url: str, *, patience_s: float) -> Counter[str]:
    """1,000 requests at once; every second client gives up after `patience_s`."""

    async def ask(session: aiohttp.ClientSession, number: int) -> str:
        body = {"prompt": "hello", "max_tokens": 20, "stream": number % 3 == 0}
        limit_s = patience_s if number % 2 else 60
        try:
            async with asyncio.timeout(limit_s), session.post(f"{url}/v1/completions", json=body) as answer:
                text = await answer.text()
                if answer.status == 429:
                    assert int(answer.headers["retry-after"]) >= 1
                    assert json.loads(text)["error"]["code"] == "overloaded"
                return str(answer.status)
        except TimeoutError:
            return "gave up"

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return Counter(await asyncio.gather(*(ask(session, number) for number in range(OFFERED))))


def test_case_27_everybody_is_answered_and_nothing_is_left(served: Served) -> None:
    before = len(served.engine.arrived)
    ends = asyncio.run(storm(served.url, patience_s=1.0))
    assert sum(ends.values()) == OFFERED
    assert set(ends) <= {"200", "429", "gave up"}
    assert ends["429"] > 0 and ends["200"] > 0
    admitted = len(served.engine.arrived) - before
    assert ends["200"] <= admitted <= OFFERED - ends["429"]
    served.wait_until(lambda: len(served.server.open_requests) == 0)
    served.wait_until(lambda: not served.engine.running)
    assert served.server.open_requests._waiting == 0


def test_case_27_after_the_storm_all_is_as_before(served: Served) -> None:
    asyncio.run(storm(served.url, patience_s=0.2))
    served.wait_until(lambda: len(served.server.open_requests) == 0)
    began_s = time.monotonic()
    assert served.post().json()["choices"][0]["text"] == "hello"
    assert time.monotonic() - began_s < 5
    assert served.http.get("/health").status_code == 200


def test_case_27_who_left_while_waiting_is_not_prefilled(tmp_path: Path) -> None:
    """The cache holds 16 blocks: what is behind the first request waits until that has ended."""
    limits = replace(LIMITS, total_blocks=16)
    with SimulatedServer("bullet", tmp_path, limits=limits, truth=UnhurriedTruth()) as server:
        first = LiveStream(server.url, prompt=[5] * 100, max_tokens=60).wait_begun()
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                server.http.post("/v1/completions", json={"prompt": [6] * 200, "max_tokens": 2}, timeout=0.2)
        deadline_s = time.monotonic() + 10
        while len(server.server.open_requests) > 1:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert len(first.times_s) < 60, "they could have been admitted"
        first.join()
        server.wait_idle()
        assert server.engine.state.prefixes.queried_tokens == 100, "more than the first prompt was admitted"


def test_case_27_no_connection_is_held_open_for_ever(served: Served) -> None:
    """A client that stops reading in the middle of a long answer: see `connection`; here its request ends at least."""
    metrics = served.server.open_requests.metrics
    before = metrics.finished["abort"]
    served.engine.script = lambda request: served.codec.encode("a") * 10_000
    with served.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 200, "stream": True}) as one:
        next(one.iter_raw())
    served.wait_until(lambda: metrics.finished["abort"] == before + 1)
    served.say("hello")
