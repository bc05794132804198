"""What became of one request of a run.

Knows nothing about HTTP. `kind` is `ok` or the word that its failure is counted by:

- `http_429`, `http_500`, ...: the server answered with that status
- `connect`: no connection, or it broke before an answer began
- `cut`: the stream ended before the answer did
- `timeout`: the answer had not ended in time
- `error_event`: the server told of an error in the stream
- `bad_stream`: something came that is no stream of events
- `empty`: the answer ended well and had no token
- `interrupted`: the run was stopped meanwhile
"""

from dataclasses import dataclass, field

from bulletserve.core.request import FinishReason
from bulletserve.core.slo import Slo
from bulletserve.telemetry.latency import Answer

OK, CONNECT, TIMEOUT, EMPTY, INTERRUPTED = "ok", "connect", "timeout", "empty", "interrupted"
CUT, ERROR_EVENT = "cut", "error_event"

BROKEN = frozenset({CONNECT, CUT, ERROR_EVENT})
"""Nothing that a server says because of load: it, its engine or the way to it was not there."""


@dataclass(slots=True)
class Outcome:
    """One request, told when it has ended. Times in seconds of the client's monotonic clock.

    `answer.arrival_s` is when the request was due, `sent_s` when it was sent. `asked_tokens`: the length that the
    answer was to have; `counted_by`: how its tokens were counted (`answer_stream`).
    """

    number: int
    asked_tokens: int
    answer: Answer
    sent_s: float
    kind: str = OK
    message: str = ""
    counted_by: str = ""
    ended_s: float = field(default=0.0)

    @property
    def ok(self) -> bool:
        """Whether the whole answer came."""
        return self.kind == OK

    def fail(self, kind: str, message: str) -> None:
        """It came to nothing, or to half of something."""
        self.kind, self.message = kind, message
        self.answer.finish = FinishReason.ABORT if kind == INTERRUPTED else FinishReason.ERROR

    def line(self, start_s: float, slo: Slo, rate: float) -> dict[str, object]:
        """The request as a line of a JSON file. Times count from the run's start, latencies from when it was due."""
        answer = self.answer
        known = bool(answer.token_times_s)
        return {
            "rate": rate if rate != float("inf") else "inf",
            "number": self.number,
            "due_s": _short(answer.arrival_s - start_s),
            "sent_s": _short(self.sent_s - start_s),
            "ended_s": _short(self.ended_s - start_s),
            "kind": self.kind,
            "message": self.message,
            "finish": answer.finish,
            "met": answer.meets(slo),
            "prompt_tokens": answer.prompt_tokens,
            "asked_tokens": self.asked_tokens,
            "output_tokens": len(answer.token_times_s),
            "counted_by": self.counted_by,
            "ttft_s": _short(answer.ttft_s) if known else None,
            "tpot_s": None if answer.tpot_s is None else _short(answer.tpot_s),
            "longest_gap_s": _short(max(answer.gaps_s)) if len(answer.token_times_s) > 1 else None,
            "whole_s": _short(answer.whole_s) if known else None,
            "token_times_s": [_short(time_s - start_s) for time_s in answer.token_times_s],
        }


def _short(seconds: float) -> float:
    return round(seconds, 6)
