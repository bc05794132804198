"""When the tokens of one streamed answer came, from the events of any OpenAI-compatible server.

Knows nothing about sockets. Servers differ in how many tokens an event carries and in what they tell of it; how the
tokens were counted is part of the result:

- `token ids`: every event brings the ids of its tokens.
- `usage`: every event brings the count so far.
- `events, usage`: an event with text is a token, and the usage at the end has the count. Where it is higher, some
  events carried several tokens; they count to the last event. TTFT, TPOT, longest gap and the set of all ITLs do not
  depend on which event it was: tokens that come together have gaps of zero wherever they are.
- `events`: there was no usage, an event with text is a token.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from bulletserve.client.event_splitter import EventSplitter
from bulletserve.client.outcome import CUT, ERROR_EVENT

BAD_STREAM = "bad_stream"

_MOST_TOO_MANY = 1000


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


_decoder = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an answer is none: a word that is counted by, and what there is to read."""

    kind: str
    message: str


class AnswerStream:
    """Fed with what the socket gives. `wanted_tokens`: most that were asked for, a limit on what usage may claim."""

    __slots__ = (
        "_by_ids", "_by_usage", "_events_s", "_splitter", "_usage_tokens", "_wanted_tokens", "done",
        "failure", "finish_reason", "prompt_tokens", "tokens_so_far",
    )  # fmt: skip

    def __init__(self, wanted_tokens: int) -> None:
        self._splitter = EventSplitter()
        self._wanted_tokens = wanted_tokens
        self._events_s: list[tuple[float, int]] = []
        self._by_ids = self._by_usage = True
        self._usage_tokens: int | None = None
        self.tokens_so_far = 0
        self.prompt_tokens: int | None = None
        self.finish_reason = ""
        self.done = False
        self.failure: Failure | None = None

    def feed(self, data: bytes, now_s: float) -> None:
        """Take in bytes that came at `now_s`. After the end or a failure nothing counts any more."""
        for payload in self._splitter.feed(data):
            if self.done or self.failure is not None:
                return
            self._take(payload, now_s)
        if self._splitter.overflowed and self.failure is None:
            self.failure = Failure(BAD_STREAM, "an event without end")

    def close(self) -> None:
        """The connection has ended: without an end of the answer that is a cut."""
        if self.failure is None and not self.done and not self.finish_reason:
            self.failure = Failure(CUT, f"the stream was cut after {self.tokens_so_far} tokens")

    def token_times_s(self) -> tuple[list[float], str]:
        """The time of every token, and how they were counted."""
        counts = [count for _, count in self._events_s]
        if counts and self._by_ids:
            return self._times(counts), "token ids"
        total = self._usage_tokens
        if total is None or not 0 <= total <= max(self._wanted_tokens, len(counts)):  # no usage, or a mad one
            return self._times(counts), "events"
        if counts and total > sum(counts):
            counts[-1] += total - sum(counts)
        while sum(counts) > total:  # events that were no token of their own, counted from the end
            counts[-1] -= min(counts[-1], sum(counts) - total)
            if not counts[-1]:
                counts.pop()
        return self._times(counts), "usage" if self._by_usage else "events, usage"

    def _times(self, counts: list[int]) -> list[float]:
        return [now_s for (now_s, _), count in zip(self._events_s, counts, strict=False) for _ in range(count)]

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload.strip() == b"[DONE]":
            self.done = True
            return
        try:
            event = _decoder.decode(payload)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self.failure = Failure(BAD_STREAM, f"an event that cannot be read ({error}): {_excerpt(payload)}")
            return
        if event.error is not None or event.object == "error":
            self.failure = Failure(ERROR_EVENT, _message(event.error if event.error is not None else event.message))
            return
        claimed = event.usage.completion_tokens if event.usage is not None else None
        if event.usage is not None and event.usage.prompt_tokens is not None:
            self.prompt_tokens = event.usage.prompt_tokens
        choice = next((one for one in event.choices or () if one.index == 0), None)
        if choice is not None:
            self._count(choice, claimed, now_s)
        if claimed is not None:
            self._usage_tokens = claimed

    def _count(self, choice: _Choice, claimed: int | None, now_s: float) -> None:
        """Note the tokens of one event with a choice."""
        if choice.finish_reason:
            self.finish_reason = choice.finish_reason
        speaks = _speaks(choice)
        if choice.token_ids is None:
            self._by_ids = self._by_ids and not speaks  # an event that only tells a role brings no ids
        if claimed is None or not self.tokens_so_far <= claimed <= self._wanted_tokens:
            self._by_usage = False
        if choice.token_ids is not None:
            count = len(choice.token_ids)
        elif self._by_usage and claimed is not None:
            count = claimed - self.tokens_so_far
        else:
            count = int(speaks)
        if count:
            self.tokens_so_far += count
            self._events_s.append((now_s, count))
            if self.tokens_so_far > _MOST_TOO_MANY + 2 * self._wanted_tokens:
                self.failure = Failure(BAD_STREAM, f"{self._wanted_tokens} tokens were asked for, and it does not end")


def _speaks(choice: _Choice) -> bool:
    """Whether an event with this choice brings a token as far as one can see: text, or the text held back of a token
    in the middle. An empty beginning (a role) or end is none."""
    delta = choice.delta
    if delta is None:
        return bool(choice.text) or (choice.text == "" and not choice.finish_reason)
    if delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls:
        return True
    return delta.content == "" and delta.role is None and not choice.finish_reason


def _message(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:300]


def _excerpt(payload: bytes) -> str:
    return payload[:80].decode("utf-8", "replace")
