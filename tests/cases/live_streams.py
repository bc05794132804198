"""Streams that are watched while something happens to the server: when each of their tokens came."""

import json
import threading
import time
from itertools import pairwise

import httpx


class LiveStream:
    """One streamed answer, read on a thread of its own. Times in seconds of the monotonic clock."""

    def __init__(self, url: str, **body: object) -> None:
        self.times_s: list[float] = []
        self.sent_s = time.monotonic()
        self.status = 0
        self._left = False
        self._body = {"ignore_eos": True, "stream": True, **body}
        self._url = url
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def ttft_s(self) -> float:
        """From the sending to the first token."""
        return self.times_s[0] - self.sent_s

    def wait_begun(self) -> "LiveStream":
        """Until the first token is there."""
        deadline_s = time.monotonic() + 30
        while not self.times_s:
            assert self._thread.is_alive() and time.monotonic() < deadline_s, f"no token (HTTP {self.status})"
            time.sleep(0.002)
        return self

    def join(self) -> "LiveStream":
        """Until the end of the answer."""
        self._thread.join(60)
        assert not self._thread.is_alive() and self.status == 200, self.status
        return self

    def leave(self) -> None:
        """Read no more: the client is gone with the next token."""
        self._left = True
        self.join()

    def gaps_s(self, from_s: float = 0.0, to_s: float = float("inf")) -> list[float]:
        """The gaps between its tokens that lie in a window."""
        return [after - before for before, after in pairwise(self.times_s) if after >= from_s and before <= to_s]

    def _read(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=60) as answer:
            self.status = answer.status_code
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    self.times_s.append(time.monotonic())
                if self._left:
                    return
