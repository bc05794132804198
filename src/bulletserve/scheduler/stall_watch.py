"""Notices a policy that starts nothing while requests are open and nothing is under way.

Knows nothing about policies or requests. Such a state changes by itself only if the policy waits for something, an hour
or a newcomer; ours never do, and no wait of seconds on an idle device serves anybody. A plan that admits or preempts
without ever starting is no help either, so steps count and not plans.
"""

WARN_S = 5.0
LIMIT_S = 30.0

MOST_TURNS = 10_000
"""Where turns follow each other at once, as with a policy that admits and preempts in turn, a clock that moves with
events stands still."""


class StallWatch:
    """One loop's. `seconds` and `turns`: for how long it has stood still; `is_worth_a_word` once in each standstill."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self.turns = 0
        self._told = False
        self.seconds = 0.0

    @property
    def stands(self) -> bool:
        """Whether the last turn was one of a standstill."""
        return self._since_s is not None

    def is_over(self, stuck: bool, now_s: float) -> bool:
        """One more turn has been; whether it has stood still for so long that there is nothing to wait for."""
        if not stuck:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s, self.turns, self._told = now_s, 0, False
        self.turns += 1
        self.seconds = now_s - self._since_s
        over = self.seconds >= LIMIT_S or self.turns >= MOST_TURNS
        if over:
            self._since_s = None
        return over

    def is_worth_a_word(self) -> bool:
        """Whether people should be told now."""
        if self._since_s is None or self._told or self.seconds < WARN_S:
            return False
        self._told = True
        return True
