"""What is known of one HTTP request when it has ended: for the log and for traces.

Knows nothing about either. Holds nothing secret: no header but the request's id and the trace it belongs to, no body.
"""

import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from bulletserve.server.calls import Call

Watcher: TypeAlias = Callable[["RequestFacts"], None]

_KEY = "bullet.facts"


@dataclass(slots=True)
class RequestFacts:
    """Filled in as a request passes. `status` 0: the client left before an answer.

    `request_id` is what the client called it, or was made (`is_named` False); `engine_ids` are the first and the last
    number under which the engine knew its prompts. Counts are over all its answers; `finish` has one word for each
    kind of end. `first_token_s` is from the request's beginning.
    """

    request_id: str
    is_named: bool
    method: str
    path: str
    client: str = ""
    traceparent: str = ""
    began_s: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)
    status: int = 0
    seconds: float = 0.0
    model: str = ""
    engine_ids: tuple[int, int] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: str = ""
    first_token_s: float | None = None

    def answered(self, call: Call) -> None:
        """Take in what became of the prompts."""
        answers = call.answers
        ids = [answer.prompt.request.id for answer in answers]
        self.engine_ids = (ids[0], ids[-1])
        self.prompt_tokens = sum(answer.prompt_tokens for answer in answers)
        self.cached_tokens = sum(answer.cached_tokens for answer in answers)
        self.completion_tokens = sum(answer.tokens for answer in answers)
        ends = {"error" if call.error else "abort" if a.end is None else a.end.finish_reason for a in answers}
        self.finish = ",".join(sorted(ends))
        firsts = [answer.first_token_s for answer in answers if answer.tokens]
        self.first_token_s = min(firsts) - self.began_s if firsts else None

    def ended(self) -> None:
        """The answer is out, or nobody waits for it."""
        self.seconds = time.monotonic() - self.began_s


def keep_facts(scope: MutableMapping[str, Any], facts: RequestFacts) -> None:
    """Let whoever handles `scope` find its facts."""
    scope[_KEY] = facts


def facts_of(scope: MutableMapping[str, Any]) -> RequestFacts:
    """The facts of an HTTP request that came through the doorway."""
    facts = scope[_KEY]
    assert isinstance(facts, RequestFacts)
    return facts
