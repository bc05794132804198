"""The guide of a device that makes its tokens up: it allows every token, at once.

Knows nothing about grammars. A row with one therefore waits for its mask, leaves the rows and joins them again as over
a real engine, where a mask takes some 20 us; only what it says keeps to no format, and ends by its length or an end
token alone.
"""

from dataclasses import dataclass

from bulletserve.core.events import Masked
from bulletserve.core.ports import Poster


@dataclass(frozen=True, slots=True)
class AllowingGuide:
    """A `Guide` whose answers go to `poster`."""

    poster: Poster

    def begin(self, request_id: int, grammar: str) -> None:
        """The first token may be any."""
        self.poster.post(Masked(request_id))

    def follow(self, request_id: int, token: int) -> None:
        """So may the next."""
        self.poster.post(Masked(request_id))

    def forget(self, request_id: int) -> None:
        """Nothing was kept."""
