"""Service-level objectives: what latency a request was promised.

Knows nothing about how the promise is kept. TTFT is the time from arrival to the first token, TPOT the mean
time per output token after the first.
"""

from dataclasses import dataclass

NO_DEADLINE_S = 1e18
"""A deadline that never comes, a target that is none: a finite number, so that snapshots survive JSON."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets of one class of requests; None is no target, and a class without any is best effort.

    The first token is due `ttft_s` after arrival, and `ttft_s_per_token` later for each token of the prompt.
    """

    name: str = "default"
    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_s_per_token: float = 0.0

    def ttft_target_s(self, prompt_tokens: int) -> float | None:
        """The longest time to the first token that a prompt of so many tokens was promised."""
        return None if self.ttft_s is None else self.ttft_s + prompt_tokens * self.ttft_s_per_token

    def describe(self) -> str:
        """The targets for people, such as "TTFT 300 ms, TPOT 12 ms"; "" for none."""
        named = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        return ", ".join(f"{name} {seconds * 1e3:g} ms" for name, seconds in named if seconds is not None)

    def ttft_deadline_s(self, arrival_s: float, prompt_tokens: int) -> float:
        """The moment by which the first token is due."""
        target_s = self.ttft_target_s(prompt_tokens)
        return NO_DEADLINE_S if target_s is None else arrival_s + target_s
