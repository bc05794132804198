"""What an answer looks like on the wire: one JSON document, or server-sent events.

Knows nothing about how it comes about. An event is made for every token of every stream, so it is a prefix made once,
the text as a JSON string, and a suffix made once: no object is built and no encoder walks one. Text is escaped down to
ASCII, because some clients split the stream at every character that Unicode calls a line break.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii

from bulletserve.server.calls import Answer, Delta
from bulletserve.server.token_log import ToldToken
from bulletserve.server.tool_message import finish_reason, message

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every document and event of one answer says: the same id and time on each (`created` in Unix seconds)."""

    id: str
    created: int
    model: str
    chat: bool

    def fields(self, *, chunk: bool) -> dict[str, object]:
        """The fields before the choices."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(answers: Sequence[Answer]) -> dict[str, object]:
    """The tokens of these answers, each prompt counted once."""
    return _usage(
        sum(answer.prompt_tokens for answer in answers if not answer.prompt.copy),
        sum(answer.tokens for answer in answers),
        sum(answer.cached_tokens for answer in answers if not answer.prompt.copy),
    )


def document(head: AnswerHead, answers: Sequence[Answer]) -> bytes:
    """The whole answer to a call that does not stream."""
    choices = []
    for answer in answers:
        assert answer.end is not None
        said = message(answer)
        calls = len(said.get("tool_calls", ()))
        text: dict[str, object] = {"message": said} if head.chat else {"text": answer.text}
        choices.append(
            {
                "index": answer.choice,
                **text,
                "logprobs": logprobs(answer, answer.told),
                "finish_reason": finish_reason(answer.end, calls),
                "stop_reason": answer.end.stop_reason,
                **({} if head.chat else _prompt_logprobs(answer)),
            }
        )
    of_prompt = _prompt_logprobs(answers[0]) if head.chat else {}
    whole = {**head.fields(chunk=False), "choices": choices, "usage": usage(answers), **of_prompt}
    return json.dumps(whole, separators=(",", ":")).encode()


def logprobs(answer: Answer, told: Sequence[ToldToken] | None) -> dict[str, object] | None:
    """The field `logprobs` of these tokens of an answer; None where nobody asked."""
    extras = answer.prompt.extras
    return None if extras is None or extras.log is None or told is None else extras.logprobs(told)


def _prompt_logprobs(answer: Answer) -> dict[str, object]:
    extras = answer.prompt.extras
    return {"prompt_logprobs": extras.prompt_logprobs()} if extras is not None and extras.tells_prompt else {}


class Events:
    """The events of one stream.

    include_usage: end with a chunk that has usage and no choices. continuous_usage: tell it on every chunk.
    """

    def __init__(
        self, head: AnswerHead, answers: Sequence[Answer], *, include_usage: bool, continuous_usage: bool
    ) -> None:
        self._answers = answers
        self._chat = head.chat
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        shared = json.dumps(head.fields(chunk=True), separators=(",", ":"))[:-1]
        self._head = f"data: {shared}"
        self._before = [
            f'{self._head},"choices":[{{"index":{choice},{self._opening()}' for choice in range(len(answers))
        ]
        self._after = self._tail(None)
        self._silent = [head.chat] * len(answers)

    def chunk(self, delta: Delta) -> bytes:
        """One event. The first of a choice also tells the role, so that no event comes before a token."""
        text = encode_basestring_ascii(delta.text)
        before = self._before[delta.choice]
        if self._silent[delta.choice]:
            self._silent[delta.choice] = False
            before = before.replace('"delta":{', '"delta":{"role":"assistant",')
        if delta.end is None and delta.told is None and not self._continuous_usage:
            return f"{before}{text}{self._after}".encode()
        tail = self._tail(delta)
        if delta.told is not None:
            told = json.dumps(logprobs(self._answers[delta.choice], delta.told), separators=(",", ":"))
            tail = tail.replace('"logprobs":null', f'"logprobs":{told}', 1)
        return f"{before}{text}{tail}".encode()

    def last(self) -> bytes:
        """What comes after every choice has ended."""
        if not self._include_usage:
            return DONE
        counted = json.dumps(usage(self._answers), separators=(",", ":"))
        return f'{self._head},"choices":[],"usage":{counted}}}\n\n'.encode() + DONE

    def _opening(self) -> str:
        return '"delta":{"content":' if self._chat else '"text":'

    def _tail(self, delta: Delta | None) -> str:
        end = None if delta is None else delta.end
        closing = "}" if self._chat else ""
        if end is None:
            tail = f'{closing},"logprobs":null,"finish_reason":null}}]'
        else:
            reason = json.dumps(end.stop_reason)
            tail = f'{closing},"logprobs":null,"finish_reason":"{end.finish_reason}","stop_reason":{reason}}}]'
        if delta is not None and self._continuous_usage:
            answer = self._answers[delta.choice]
            counted = _usage(answer.prompt_tokens, delta.tokens, answer.cached_tokens)
            tail += f',"usage":{json.dumps(counted, separators=(",", ":"))}'
        elif self._include_usage:
            tail += ',"usage":null'
        return tail + "}\n\n"


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
