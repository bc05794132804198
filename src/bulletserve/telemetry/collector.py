"""An outlet that keeps every answer: what the simulator, `compare` and the tests read their figures from.

Knows nothing about who produced the outputs.
"""

from bulletserve.core.events import Output, Status
from bulletserve.core.request import FinishReason, Request
from bulletserve.telemetry.latency import Answer


class Collector:
    """Implements `core.ports.Outlet`. Token times are those of the turns that told them."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}
        self.messages: dict[int, str] = {}
        self.statuses: list[Status] = []
        self.open = 0

    def expect(self, request: Request) -> None:
        """A request is about to be posted."""
        self.answers[request.id] = Answer(request.arrival_s, len(request.prompt_ids))
        self.open += 1

    def emit(self, output: Output) -> None:
        """Note one turn's tokens and ends."""
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            answer = self.answers[request_id]
            answer.token_times_s.append(output.now_s)
            answer.tokens.append(token)
        for request_id, cached_tokens in output.first_tokens:
            self.answers[request_id].cached_tokens = cached_tokens
        for finished in output.finished:
            self.answers[finished.request_id].finish = finished.reason
            self.open -= 1
            if finished.reason in (FinishReason.ERROR, FinishReason.REFUSED):
                self.messages[finished.request_id] = finished.message

    def report(self, status: Status) -> None:
        """Keep a status."""
        self.statuses.append(status)
