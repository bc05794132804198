"""A real engine with a small random model behind a real server, all in this process."""

import json
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from bulletserve.compose import build_engine
from bulletserve.core.config import EngineConfig
from bulletserve.core.events import Stop
from bulletserve.server.serve import HttpServer
from bulletserve.server.settings import ServerSettings
from bulletserve.server.text_codec import TextCodec
from bulletserve.transport.engine_end import EngineEnd
from bulletserve.transport.front_end import FrontEnd
from tests.end_to_end.test_processes import CONFIG

END_ID = 400
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
)


class EngineServer:
    """`options` are the engine's, `settings` the server's."""

    def __init__(self, folder: Path, settings: ServerSettings | None = None, **options: Any) -> None:
        (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": END_ID}))
        config = EngineConfig(str(folder / "config.json"), load_format="dummy", dtype="float32", **options)
        self.engine = build_engine(config)
        self._front = FrontEnd()
        self._end = EngineEnd(self._front.addresses, self.engine.inbox, block_size=config.block_size)
        self.loop = self.engine.loop(self._end)
        self._end.ready(self.engine.info)
        self._loop_thread = threading.Thread(target=self.loop.run, daemon=True)
        self._loop_thread.start()
        codec = TextCodec.from_checkpoint(self.engine.checkpoint, TEMPLATE)
        settings = settings or ServerSettings(("small",), port=0, grace_s=0.5)
        self.server = HttpServer(self._front, self._front.wait_ready(20), codec, settings)
        self._server_thread = threading.Thread(target=self.server.run, daemon=True)
        self._server_thread.start()
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def __enter__(self) -> "EngineServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        self.server.shutdown(0.0)
        self._server_thread.join(20)
        self.engine.inbox.post(Stop())
        self._loop_thread.join(20)
        self._end.close()
        self._front.close()
        self.engine.close()

    def complete(self, **body: Any) -> dict[str, Any]:
        """The first choice of a completion."""
        answer = self.http.post("/v1/completions", json={"prompt": "hello", **body})
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    def chat(self, **body: Any) -> httpx.Response:
        """A chat."""
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **body})
