"""When each open request was first admitted, so that its owner can tell waiting from working.

Knows nothing about queues or plans. Fed by the loop; a preempted request keeps its first time.
"""

from collections.abc import Iterable
from dataclasses import replace

from bulletserve.core.events import Output


class Admissions:
    """Of the requests that were admitted and have had no token yet."""

    def __init__(self) -> None:
        self._admitted_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._admitted_s)

    def note(self, request_ids: Iterable[int], now_s: float) -> None:
        """These were admitted now."""
        for request_id in request_ids:
            self._admitted_s.setdefault(request_id, now_s)

    def told(self, output: Output) -> Output:
        """`output` with the times of those whose first token it has; who ends without one is forgotten."""
        if output.first_tokens:
            times_s = [self._admitted_s.pop(request_id, output.now_s) for request_id, *_ in output.first_tokens]
            output = replace(output, admitted_s=tuple(times_s))
        for finished in output.finished:
            self._admitted_s.pop(finished.request_id, None)
        return output
