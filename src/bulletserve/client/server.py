"""One OpenAI-compatible server: what it serves, and one streamed request put to it.

The only module that knows aiohttp (chosen by processor time per streamed token, docs/decisions/0002). Every request has
a connection of its own: servers close idle ones when they like, and a request that met one just then would be a failure
that is none of the server's. So TTFT holds the opening of a connection, a tenth of a millisecond within one machine.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from bulletserve.client.answer_stream import BAD_STREAM, AnswerStream
from bulletserve.client.outcome import CONNECT, CUT, EMPTY, ERROR_EVENT, TIMEOUT, Outcome
from bulletserve.core.errors import ConfigError, ServerRefuses
from bulletserve.version import __version__

_AFTER_DONE_S = 1.0
_QUESTION_S = 20.0
_MOST_ERROR_BYTES = 1 << 16


def base_url(text: str) -> str:
    """A server's URL as http://host:port/v1, `/v1` added where it is missing.

    Raises `ConfigError` for what is none, or has a password or a query: those would be written into results.
    """
    try:
        parts = urlsplit(text)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        port_ok = False
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok:
        raise ConfigError(f"--url: {text.rpartition('@')[2]!r} is no URL such as http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("--url: leave user, password, query and fragment out; keys go into --api-key-env or -file")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else path + '/v1'}"


class Server:
    """An open session. `timeout_s`: the longest that one answer may take from sending to its end."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url
        self._api_key = api_key
        self._timeout_s = timeout_s
        headers = {"user-agent": f"bullet-bench/{__version__}", "accept": "text/event-stream, application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=None),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=True,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def model(self) -> str:
        """The first model that it serves. Raises `ServerRefuses` with the reason if it does not say."""
        url = f"{self.url}/models"
        try:
            async with (
                asyncio.timeout(_QUESTION_S),
                self._session.get(url, allow_redirects=False) as response,
            ):
                data = await _beginning(response)
                if response.status != 200:
                    raise ServerRefuses(f"{url} answers {response.status}: {self._error_text(data)}")
            return str(msgspec.json.decode(data)["data"][0]["id"])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerRefuses(f"no server answers at {url}: {self._words(error)}") from None
        except (msgspec.DecodeError, LookupError, TypeError, ValueError, RecursionError):
            raise ServerRefuses(f"{url} tells no model: name one with --model") from None

    async def is_there(self) -> bool:
        """Whether anything answers, whatever it says."""
        try:
            async with (
                asyncio.timeout(_QUESTION_S),
                self._session.get(f"{self.url}/models", allow_redirects=False) as response,
            ):
                return response.status > 0
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def ask(
        self, path: str, body: bytes, outcome: Outcome, on_tokens: Callable[[int], None] = lambda count: None
    ) -> None:
        """Send a request that streams and put down what becomes of it; never raises but when it is cancelled.

        `on_tokens` is called with the number of tokens that came.
        """
        stream = AnswerStream(outcome.asked_tokens)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(path, body, outcome, stream, on_tokens)
        except TimeoutError:
            if not stream.done:
                outcome.fail(TIMEOUT, f"no end after {self._timeout_s:g} s")
        except Exception as error:  # whatever strange bytes make a library raise is the failure of one request
            if not (stream.done or stream.finish_reason):
                outcome.fail(CUT if stream.tokens_so_far else CONNECT, self._words(error))
        finally:
            outcome.ended_s = time.monotonic()
            self._conclude(outcome, stream)

    def _conclude(self, outcome: Outcome, stream: AnswerStream) -> None:
        """Put down what came, and whether that is a whole answer."""
        answer = outcome.answer
        answer.token_times_s, outcome.counted_by = stream.token_times_s()
        if stream.prompt_tokens is not None:
            answer.prompt_tokens = stream.prompt_tokens
        if not outcome.ok:
            return
        answer.finish = stream.finish_reason
        if stream.failure is not None:
            outcome.fail(stream.failure.kind, self._clean(stream.failure.message))
        elif not answer.ended_well:
            outcome.fail(ERROR_EVENT, f"the server ended it: finish_reason {stream.finish_reason}")
        elif not answer.token_times_s:
            outcome.fail(EMPTY, "the answer has no token")

    async def _stream(
        self, path: str, body: bytes, outcome: Outcome, stream: AnswerStream, on_tokens: Callable[[int], None]
    ) -> None:
        url = self.url + path
        headers = {"content-type": "application/json"}
        outcome.sent_s = time.monotonic()
        async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                data = await _beginning(response)
                outcome.fail(f"http_{response.status}", self._error_text(data))
                return
            kind = response.content_type
            if kind != "text/event-stream":
                outcome.fail(BAD_STREAM, f"the answer is {kind}, not text/event-stream")
                return
            content, clock = response.content, time.monotonic
            while data := await content.readany():
                before = stream.tokens_so_far
                stream.feed(data, clock())
                on_tokens(stream.tokens_so_far - before)
                if stream.done or stream.failure is not None:
                    break
            stream.close()
            if stream.done:  # let the server end it, so that it does not think that its client left
                async with asyncio.timeout(_AFTER_DONE_S):
                    while await content.readany():
                        pass

    def _error_text(self, data: bytes) -> str:
        try:
            document = msgspec.json.decode(data)
            error = document.get("error", document) if isinstance(document, dict) else document
            text = error.get("message", error) if isinstance(error, dict) else error
        except (msgspec.DecodeError, RecursionError):
            text = data.decode("utf-8", "replace")
        return self._clean(str(text).strip() or "without a word")

    def _words(self, error: BaseException) -> str:
        return self._clean(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    def _clean(self, text: str) -> str:
        """Short enough to be read, on one line, and without the key, which some servers repeat."""
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return " ".join(text.split())[:300]


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """As much of a short document as anybody would read."""
    found = b""
    while len(found) < _MOST_ERROR_BYTES and (data := await response.content.readany()):
        found += data
    return found[:_MOST_ERROR_BYTES]
