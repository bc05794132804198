"""A server over a real engine: a small random model on the CPU's lanes, and what it says of a sequence by itself."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch

from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.shapes import ModelShape
from bulletserve.core.snapshot import Limits
from bulletserve.engine.cache_size import CacheSize
from bulletserve.engine.kv_cache import KvCache
from bulletserve.engine.load import load_cpu_executor
from bulletserve.models.context import PrefillSegment, StepContext
from bulletserve.models.decoder import Decoder
from bulletserve.models.weights import dummy_state
from bulletserve.scheduler.inbox import MonotonicClock, QueueInbox
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.loop import Loop
from bulletserve.scheduler.policies import make_policy
from bulletserve.scheduler.state import State
from bulletserve.server.serve import HttpServer
from bulletserve.server.settings import ServerSettings
from bulletserve.server.text_codec import TextCodec
from bulletserve.transport.engine_end import EngineEnd
from bulletserve.transport.front_end import FrontEnd
from tests.server.small_model import small_checkpoint

VOCABULARY, CONTEXT, BLOCK = 300, 256, 4  # the tokenizer has 278: the other ids are the padding of the tables
SHAPE = ModelShape("llama", 2, 32, 64, 4, 2, 8, VOCABULARY, CONTEXT)


class ModelServer:
    """The server and its model. In float64, so that no order of additions decides between two tokens."""

    def __init__(self, folder: Path, total_blocks: int = 400, max_waiting: int = 64) -> None:
        checkpoint = replace(small_checkpoint(folder), shape=SHAPE)
        self.codec = TextCodec.from_checkpoint(checkpoint)
        state = dummy_state(SHAPE, torch.float64, "cpu", seed=5)
        self.model = Decoder(SHAPE, {name: 2 * tensor for name, tensor in state.items()}, torch.float64)
        self.front_end = FrontEnd()
        inbox = QueueInbox()
        end = EngineEnd(self.front_end.addresses, inbox, block_size=BLOCK)
        size = CacheSize(total_blocks, CONTEXT, 8)
        self.executor = load_cpu_executor(self.model, size, BLOCK, inbox, cores=2)
        limits = Limits(SHAPE.num_layers, BLOCK, total_blocks, 8, 40, 24, self.executor.lattice)
        policy = make_policy("static_split")
        self.state = State(limits, KvLedger(total_blocks + 1, BLOCK), policy.rules)
        loop = Loop(self.state, policy, self.executor, inbox, MonotonicClock(), end)
        end.ready(
            EngineInfo("small", VOCABULARY, CONTEXT, BLOCK, total_blocks, 8, "static_split", "cpu", "float64", True)
        )

        def run() -> None:
            loop.run()
            end.close()

        self._loop = threading.Thread(target=run, daemon=True)
        self._loop.start()
        settings = ServerSettings(("small",), port=0, grace_s=0.5, max_waiting=max_waiting)
        self.server = HttpServer(self.front_end, self.front_end.wait_ready(10), self.codec, settings)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def __enter__(self) -> "ModelServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        deadline_s = time.monotonic() + 10
        while not self.state.is_idle:  # aborted requests may still have a step in flight
            assert time.monotonic() < deadline_s, "requests are left"
            time.sleep(0.01)
        self.front_end.stop()
        self._loop.join(20)
        self.server.shutdown(0)
        self._thread.join(20)
        self.executor.close()
        self.front_end.close()
        assert not self._thread.is_alive() and not self._loop.is_alive()

    def complete(self, prompt: Any, *, status: int = 200, **body: Any) -> dict[str, Any]:
        """The document that answers a completion, greedy unless it says otherwise."""
        return self._post("/v1/completions", status, {"prompt": prompt, "temperature": 0, **body})

    def chat(self, text: str, *, status: int = 200, **body: Any) -> dict[str, Any]:
        """The document that answers a chat of one message."""
        messages = [{"role": "user", "content": text}]
        return self._post("/v1/chat/completions", status, {"messages": messages, "temperature": 0, **body})

    def events(self, path: str, **body: Any) -> httpx.Response:
        """A stream, read to its end."""
        return self.http.post(path, json={"temperature": 0, "stream": True, **body})

    def _post(self, path: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == status, response.text
        document: dict[str, Any] = response.json()
        return document

    def piece(self, token: int) -> str | bytes:
        """What a token adds to a text, control tokens included; nothing if the tokenizer does not know it."""
        pieces = self.codec.tokenizer.all_pieces
        return pieces[token] if token < len(pieces) else ""

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """The model's own logits of what follows each token of `ids` -> [len(ids), V]."""
        count = len(ids)
        cache = KvCache(SHAPE, count + 1, 1, self.model.dtype, torch.device("cpu"))
        place = torch.arange(count)
        context = StepContext(place, place + 1, (PrefillSegment(0, count, place + 1, count),))
        hidden = self.model.run_layers(self.model.embed(torch.tensor(ids)), 0, SHAPE.num_layers, context, cache)
        return self.model.logits(hidden)

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` likeliest tokens one after the other."""
        tokens = list(ids)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(ids) :]
