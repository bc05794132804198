"""The message of a whole answer, with the tool calls in it.

Knows nothing about formats: `tool_calls` finds the parts. An answer that has called a tool and came to its own end ends
with "tool_calls", one that was cut off with "length" as ever.
"""

from typing import Any

from bulletserve.server.calls import Answer, End
from bulletserve.server.tool_calls import CallStart, CallText


def finish_reason(end: End, calls: int) -> str:
    """Why an answer with so many calls ended, as clients are told."""
    return "tool_calls" if calls and end.finish_reason == "stop" else end.finish_reason


def message(answer: Answer) -> dict[str, Any]:
    """The message of an answer that has ended."""
    make_reader = answer.prompt.make_reader
    if make_reader is None:
        return {"role": "assistant", "content": answer.text}
    reader, content = make_reader(), ""
    calls: list[dict[str, Any]] = []
    for part in (*reader.push(answer.text), *reader.finish()):
        if isinstance(part, CallStart):
            calls.append({"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        elif isinstance(part, CallText):
            calls[part.call]["function"]["arguments"] += part.text
        else:
            content += part
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": calls}
