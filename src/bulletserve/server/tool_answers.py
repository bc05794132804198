"""The events of streamed answers that may hold tool calls.

Knows nothing about formats: `tool_calls` finds the parts.
"""

import json
from collections.abc import Sequence
from typing import Any

from bulletserve.server.answers import AnswerHead, Events, logprobs, usage
from bulletserve.server.calls import Answer, Delta
from bulletserve.server.token_log import ToldToken
from bulletserve.server.tool_calls import CallStart, CallText, Part
from bulletserve.server.tool_message import finish_reason


class ToolEvents(Events):
    """The events of one stream whose answers may hold calls. Few are so, and each event is encoded whole."""

    def __init__(
        self, head: AnswerHead, answers: Sequence[Answer], *, include_usage: bool, continuous_usage: bool
    ) -> None:
        super().__init__(head, answers, include_usage=include_usage, continuous_usage=continuous_usage)
        self._fields = head.fields(chunk=True)
        self._shown = answers
        self._usage_null = include_usage
        self._usage_told = continuous_usage
        self._readers = [answer.prompt.make_reader() if answer.prompt.make_reader else None for answer in answers]
        self._calls = [0] * len(answers)
        self._begun = [False] * len(answers)
        self._untold: list[list[ToldToken]] = [[] for _ in answers]

    def chunk(self, delta: Delta) -> bytes:
        """The events of one delta; none where its text is held back. What is told of tokens rides on the first."""
        reader = self._readers[delta.choice]
        if reader is None:
            return super().chunk(delta)
        self._untold[delta.choice] += delta.told or ()
        parts = reader.push(delta.text)
        if delta.end is not None:
            parts += reader.finish()
        self._calls[delta.choice] += sum(isinstance(part, CallStart) for part in parts)
        events = [self._event(delta, part, last=False) for part in parts[:-1]]
        if parts or delta.end is not None:
            events.append(self._event(delta, parts[-1] if parts else None, last=True))
        return b"".join(events)

    def _event(self, delta: Delta, part: Part | None, *, last: bool) -> bytes:
        """One part as an event; the end of the answer rides on the last one."""
        said: dict[str, Any] = {} if self._begun[delta.choice] else {"role": "assistant"}
        self._begun[delta.choice] = True
        if isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            said["tool_calls"] = [{"index": part.call, "id": part.id, "type": "function", "function": function}]
        elif isinstance(part, CallText):
            said["tool_calls"] = [{"index": part.call, "function": {"arguments": part.text}}]
        elif part is not None:
            said["content"] = part
        told, self._untold[delta.choice] = self._untold[delta.choice], []
        choice: dict[str, Any] = {
            "index": delta.choice,
            "delta": said,
            "logprobs": logprobs(self._shown[delta.choice], told) if told else None,
            "finish_reason": None,
        }
        if delta.end is not None and last:
            choice["finish_reason"] = finish_reason(delta.end, self._calls[delta.choice])
            choice["stop_reason"] = delta.end.stop_reason
        event = {**self._fields, "choices": [choice]}
        if self._usage_told:
            event["usage"] = usage([self._shown[delta.choice]])
        elif self._usage_null:
            event["usage"] = None
        return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
