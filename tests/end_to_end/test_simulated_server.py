"""The whole way, from a client's socket through HTTP, transport, loop and policy to lanes made of arithmetic."""

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from bulletserve.scheduler.policies import POLICIES
from tests.simulated_server import LETTERS, SimulatedServer


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


def test_structured_answers_are_checked_and_served_though_their_tokens_are_made_up(simulated: SimulatedServer) -> None:
    """Beside a free stream; they end by their length."""

    def ask(**body: object) -> httpx.Response:
        return simulated.http.post("/v1/completions", json={"prompt": LETTERS, "max_tokens": 30, **body})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        formats = [{"guided_regex": "[0-9]+"}, {}, {"response_format": {"type": "json_object"}}, {}]
        asked = [pool.submit(ask, **one) for one in formats]
        answers = [one.result().json() for one in asked]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [30] * 4
    assert ask(guided_regex="(").status_code == 400


def test_a_stop_string_ends_the_request_in_the_engine(simulated: SimulatedServer) -> None:
    with httpx.Client(base_url=simulated.url, timeout=20) as http:
        answer = http.post("/v1/completions", json={"prompt": LETTERS, "max_tokens": 200, "stop": "xyz"}).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "xyz"
    assert choice["text"] in LETTERS * 2 and "xyz" not in choice["text"]
    assert answer["usage"]["completion_tokens"] == len(choice["text"]) + 3
