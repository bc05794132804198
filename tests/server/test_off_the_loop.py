"""What takes long is done in the worker threads: the event loop, which every stream waits for, does the short ones."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from bulletserve.core.resolve import check_ids
from bulletserve.formats.description import Checkpoint
from bulletserve.server.prompts import resolve_request
from bulletserve.server.text_codec import TextCodec
from tests.server.conftest import SETTINGS, Served

CHECKS_IDS = ("core.resolve", "server.prompts", "server.text_endpoints")


@pytest.fixture(scope="module")
def roomy(checkpoint: Checkpoint) -> Iterator[Served]:
    served = Served(checkpoint, replace(SETTINGS, max_waiting=6000, body_limit_bytes=10**7))
    requests = served.server.open_requests
    requests.info = replace(requests.info, max_model_len=300_000)
    yield served
    served.close()


class Threads:
    """Which threads something ran on, and how often it did."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._threads: list[threading.Thread] = []

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **named: Any) -> Any:
            self._threads.append(threading.current_thread())
            return function(*args, **named)

        return watched

    def take(self) -> tuple[int, set[str]]:
        threads, self._threads = self._threads, []
        return len(threads), {"loop" if one is self._served.thread else one.name.split("_")[0] for one in threads}


@pytest.fixture
def checks(roomy: Served, monkeypatch: pytest.MonkeyPatch) -> Threads:
    """The threads on which ids were compared with the vocabulary."""
    threads = Threads(roomy)
    for module in CHECKS_IDS:
        monkeypatch.setattr(f"bulletserve.{module}.check_ids", threads.watched(check_ids))
    return threads


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [70] * 200_000}),
        ("/v1/completions", {"prompt": [[70] * 20_000, [71, 72]], "n": 2}),
        ("/v1/completions", {"prompt": [70] * 5000, "echo": True}),
        ("/v1/completions", {"prompt": "ab" * 5000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab" * 5000}], "n": 2}),
        ("/detokenize", {"tokens": [70] * 200_000}),
    ],
)
def test_long_prompts_are_checked_beside_the_loop(
    roomy: Served, checks: Threads, path: str, body: dict[str, Any]
) -> None:
    assert roomy.http.post(path, json={"max_tokens": 1, **body}).status_code == 200
    count, names = checks.take()
    assert count and names == {"tokenize"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [70] * 500}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
        ("/detokenize", {"tokens": [70] * 500}),
    ],
)
def test_short_prompts_are_spared_the_way(roomy: Served, checks: Threads, path: str, body: dict[str, Any]) -> None:
    assert roomy.http.post(path, json={"max_tokens": 1, **body}).status_code == 200
    count, names = checks.take()
    assert count and names == {"loop"}


@pytest.mark.parametrize("prompt", ["abc", [70, 71]])
def test_a_list_of_5000_prompts_is_made_beside_the_loop(
    roomy: Served, monkeypatch: pytest.MonkeyPatch, prompt: str | list[int]
) -> None:
    threads = Threads(roomy)
    monkeypatch.setattr("bulletserve.server.prompts.resolve_request", threads.watched(resolve_request))
    answer = roomy.post(prompt=[prompt] * 5000, max_tokens=1)
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(5000))
    assert threads.take() == (5000, {"tokenize"})


def test_tokens_become_text_beside_the_loop(roomy: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(roomy)
    monkeypatch.setattr(TextCodec, "decode", threads.watched(TextCodec.decode))
    told = roomy.http.post("/tokenize", json={"prompt": "ab " * 2000, "return_token_strs": True}).json()
    assert "".join(told["token_strs"]) == "ab " * 2000
    assert threads.take() == (told["count"], {"tokenize"})


@pytest.mark.parametrize("bad", [-1, "x" * 100_000, 1.5, True, None, [1], 10**3000], ids=lambda bad: repr(bad)[:9])
@pytest.mark.parametrize("length", [10, 20_000])
@pytest.mark.parametrize("echo", [False, True])
def test_what_is_no_id_is_named_shortly_wherever_it_stands(roomy: Served, bad: Any, length: int, echo: bool) -> None:
    ids = [70] * length
    for prompt in ([*ids, bad], [ids, [*ids, bad]], [ids, [bad, *ids]]):
        before = len(roomy.engine.arrived)
        answer = roomy.post(prompt=prompt, max_tokens=1, echo=echo)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "prompt" and repr(bad)[:30] in error["message"] and len(error["message"]) < 150
        assert len(roomy.engine.arrived) == before, "nothing is half-run"


LONG = 8000


def long_lists() -> int:
    gc.collect()
    return sum(type(one) is list and len(one) > LONG for one in gc.get_objects())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [70] * 20_000}),
        ("/v1/completions", {"prompt": "ab" * 20_000, "echo": True, "truncate_prompt_tokens": 9000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab" * 20_000}]}),
    ],
)
def test_the_collector_does_not_go_through_the_prompts_of_open_requests(
    roomy: Served, path: str, body: dict[str, Any]
) -> None:
    """A thousand of them as lists would stop all streams for 50 ms."""
    before, engine = long_lists(), roomy.engine
    engine.held, engine.arrived = True, []
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(roomy.http.post, path, json={"max_tokens": 1, **body})
        roomy.wait_until(lambda: bool(engine.arrived))
        try:
            assert len(engine.arrived[0].prompt_ids) > LONG
            assert long_lists() == before
        finally:
            engine.held = False
        assert answer.result(20).status_code == 200
