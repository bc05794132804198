"""Sends the answer to one call while watching whether anybody is still there.

Knows nothing about how prompts are made. The response starts with the first token: until then an error can still have
the right status, and no client takes a header for a token.
"""

import asyncio
import json
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bulletserve.core.errors import BulletError
from bulletserve.server.answers import DONE, AnswerHead, Events, document
from bulletserve.server.calls import Call, Prompt
from bulletserve.server.http_errors import error_object, error_response
from bulletserve.server.open_requests import OpenRequests
from bulletserve.server.request_facts import facts_of
from bulletserve.server.tool_answers import ToolEvents

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answering(Response):
    """The response to one call: submits its prompts, answers, and aborts what nobody waits for any more."""

    def __init__(
        self,
        open_requests: OpenRequests,
        prompts: Sequence[Prompt],
        head: AnswerHead,
        *,
        stream: bool,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        super().__init__()
        self._open_requests = open_requests
        self._prompts = prompts
        self._head = head
        self._stream = stream
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        try:
            call = self._open_requests.submit(self._prompts, streaming=self._stream)
        except BulletError as error:
            await error_response(error)(scope, receive, send)
            return
        watcher = asyncio.create_task(_watch(call, receive))
        try:
            await call.changed()
            if call.error is not None:
                await error_response(call.error)(scope, receive, send)
            elif self._stream:
                await self._send_events(call, send)
            elif not call.gone:
                content = document(self._head, call.answers)
                await Response(content, media_type="application/json")(scope, receive, send)
        finally:
            watcher.cancel()
            facts_of(scope).answered(call)
            self._open_requests.close(call)

    async def _send_events(self, call: Call, send: Send) -> None:
        kind = ToolEvents if any(prompt.make_reader for prompt in self._prompts) else Events
        events = kind(
            self._head,
            call.answers,
            include_usage=self._include_usage,
            continuous_usage=self._continuous_usage,
        )
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        while not call.gone:
            body = b"".join(map(events.chunk, call.take()))
            done = call.done
            if call.error is not None:
                body += b"data: " + json.dumps(error_object(call.error)).encode() + b"\n\n" + DONE
            elif done:
                body += events.last()
            await send({"type": "http.response.body", "body": body, "more_body": not done})
            if done:
                return
            await call.changed()


async def _watch(call: Call, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    call.leave()
