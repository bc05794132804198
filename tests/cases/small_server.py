"""A real engine (a small random model in float64, on this CPU's two lanes) behind a real server, in this process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.launch import Launch
from bulletserve.core.request import Request
from bulletserve.scheduler.inbox import MonotonicClock
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.loop import Loop
from bulletserve.scheduler.policies import make_policy
from bulletserve.scheduler.state import State
from bulletserve.server.serve import HttpServer
from bulletserve.server.settings import ServerSettings
from bulletserve.server.text_codec import TextCodec
from bulletserve.transport.engine_end import EngineEnd
from bulletserve.transport.front_end import FrontEnd
from tests.engine.small_engine import BLOCK_SIZE, SHAPE, serial_tokens, small_engine
from tests.server.small_model import small_checkpoint


class SmallServer:
    """A client for it, and the answers that it should give."""

    def __init__(self, url: str, codec: TextCodec) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
        self._codec = codec

    def serial_text(self, request: Request) -> str:
        """The answer to a request that has the model to itself, without scheduler or cache."""
        tokens = serial_tokens(request)
        shown = tokens[:-1] if tokens[-1] in request.stop_ids else tokens
        detokenizer = self._codec.detokenizer(request.prompt_ids, skip_special_tokens=False)
        return "".join(map(detokenizer.push, shown)) + detokenizer.finish()


def body_of(request: Request) -> dict[str, object]:
    """What a client sends to ask for this."""
    return {
        "prompt": list(request.prompt_ids),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "stop_token_ids": sorted(request.stop_ids),
        "ignore_eos": True,
        "skip_special_tokens": False,
    }


@contextmanager
def small_server(
    policy: str,
    folder: Path,
    *,
    total_blocks: int = 200,
    max_seqs: int = 8,
    delay: Callable[[Launch], None] | None = None,
) -> Iterator[SmallServer]:
    """`delay` runs on a lane's thread before each of its steps."""
    with small_engine(total_blocks, max_seqs) as engine:
        front_end = FrontEnd()
        end = EngineEnd(front_end.addresses, engine.inbox, block_size=BLOCK_SIZE)
        engine.executor.before_step = delay
        state = State(engine.limits, KvLedger(total_blocks + 1, BLOCK_SIZE))
        loop = Loop(state, make_policy(policy), engine.executor, engine.inbox, MonotonicClock(), end)
        size = min(SHAPE.max_context, total_blocks * BLOCK_SIZE)
        info = EngineInfo(
            "small", SHAPE.vocab_size, size, BLOCK_SIZE, total_blocks, max_seqs, policy, "cpu", "float64", True
        )
        end.ready(info)
        codec = TextCodec.from_checkpoint(small_checkpoint(folder))
        server = HttpServer(front_end, front_end.wait_ready(10), codec, ServerSettings(("small",), port=0))
        threads = [threading.Thread(target=loop.run), threading.Thread(target=server.run)]
        for thread in threads:
            thread.start()
        made = SmallServer(f"http://127.0.0.1:{server.port}", codec)
        try:
            yield made
        finally:
            made.http.close()
            server.shutdown(5)
            threads[1].join(20)
            front_end.stop()
            threads[0].join(20)
            end.close()
            front_end.close()
        assert not any(thread.is_alive() for thread in threads)
        state.ledger.check_integrity()
        assert state.ledger.used_blocks == 0
