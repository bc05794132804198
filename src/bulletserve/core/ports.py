"""The small doors between the scheduler's loop and the world.

Knows nothing about what stands behind them: a GPU, CPU threads, arithmetic, a socket, a list in a test.
"""

from collections.abc import Sequence
from typing import Protocol

from bulletserve.core.events import Event, Output, Status
from bulletserve.core.launch import Launch
from bulletserve.core.partition import Lattice


class Clock(Protocol):
    """Seconds on a clock that never goes back."""

    def now_s(self) -> float:
        """The current time."""


class Inbox(Protocol):
    """The one queue on which the loop blocks."""

    def wait(self, deadline_s: float) -> Sequence[Event]:
        """Everything posted since the last call, in order; blocks until there is something or the deadline."""


class Poster(Protocol):
    """The other end of an inbox, safe to use from any thread."""

    def post(self, event: Event) -> None:
        """Add an event; never blocks."""


class Executor(Protocol):
    """Turns launches into `StepDone` events, posted to the inbox it was made with."""

    @property
    def lattice(self) -> Lattice:
        """The partitions it really grants."""

    def start(self, launch: Launch) -> None:
        """Queue a step on its lane; never blocks on the device."""

    def close(self) -> None:
        """Finish what is running, drop what is queued, release the lanes."""


class Guide(Protocol):
    """Follows grammars beside the loop: every call is answered, later, by one `Masked` event. No call ever blocks."""

    def begin(self, request_id: int, grammar: str) -> None:
        """Take a request in: the mask of its first token is wanted."""

    def follow(self, request_id: int, token: int) -> None:
        """Its next token is `token`; the mask of the one after it is wanted."""

    def forget(self, request_id: int) -> None:
        """It has ended, perhaps before it was taken in; no answer is wanted any more."""


class Outlet(Protocol):
    """Where outputs go."""

    def emit(self, output: Output) -> None:
        """Hand over one turn's outputs; never blocks."""

    def report(self, status: Status) -> None:
        """Hand over the engine's status; never blocks."""
