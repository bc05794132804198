"""The definitions of every latency figure, in one place, and the record they are computed from.

Knows nothing about where times were taken; every figure names its clock by what was recorded.

- TTFT: first token minus arrival.
- TPOT: (last token - first token) / (tokens - 1); none for a single token.
- ITL: every gap between two successive tokens of one answer.
- longest gap: the largest ITL of an answer, or of all answers.
- whole: last token minus arrival.
- tokens per second: output tokens of all answers / (last token of all - first arrival).
- requests per second: answers that ended well (not by an error, a refusal or an abort) / the same time.
- met: an answer meets its targets if it ended well, has a token, and neither TTFT nor TPOT is above its target.
- quantile q: linear interpolation between the closest ranks, as numpy's default.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bulletserve.core.request import FinishReason
from bulletserve.core.slo import Slo

_ENDED_BADLY = frozenset({FinishReason.ABORT, FinishReason.ERROR, FinishReason.REFUSED})


@dataclass(slots=True)
class Answer:
    """When one request arrived and when each of its tokens did, in seconds of one clock."""

    arrival_s: float
    prompt_tokens: int
    token_times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token; infinite without one."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else float("inf")

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for fewer than two tokens."""
        count = len(self.token_times_s)
        return (self.token_times_s[-1] - self.token_times_s[0]) / (count - 1) if count > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Every gap between successive tokens."""
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]

    @property
    def whole_s(self) -> float:
        """Time to the last token; infinite without one."""
        return self.token_times_s[-1] - self.arrival_s if self.token_times_s else float("inf")

    @property
    def ended_well(self) -> bool:
        """Whether nothing but its own end ended it, as far as it has ended."""
        return self.finish not in _ENDED_BADLY

    def meets(self, slo: Slo) -> bool:
        """Whether every target was met; an answer without tokens or one that ended badly meets none."""
        return bool(self.token_times_s and self.ended_well) and within(
            slo, self.prompt_tokens, self.ttft_s, self.tpot_s
        )


def within(slo: Slo, prompt_tokens: int, ttft_s: float, tpot_s: float | None) -> bool:
    """Whether these times of an answer are not above its targets."""
    ttft_target_s = slo.ttft_target_s(prompt_tokens)
    return not (
        (ttft_target_s is not None and ttft_s > ttft_target_s)
        or (slo.tpot_s is not None and tpot_s is not None and tpot_s > slo.tpot_s)
    )


def quantile(values: Iterable[float], q: float) -> float:
    """The q-quantile (0 to 1); nan of nothing."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Times in seconds; nan where there was nothing to measure."""

    requests: int
    output_tokens: int
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    itl_p99_s: float
    longest_gap_s: float
    tokens_per_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    itl_p50_s: float
    whole_p50_s: float
    whole_p99_s: float


def summarise(answers: Sequence[Answer]) -> Summary:
    """The figures of a set of answers."""
    done = [answer for answer in answers if answer.token_times_s]
    ttfts = [answer.ttft_s for answer in done]
    tpots = [answer.tpot_s for answer in done if answer.tpot_s is not None]
    gaps = sorted(gap for answer in done for gap in answer.gaps_s)
    whole = [answer.whole_s for answer in done]
    tokens = sum(len(answer.token_times_s) for answer in done)
    span_s = _span_s(answers)
    nan = float("nan")
    return Summary(
        len(answers),
        tokens,
        quantile(ttfts, 0.5),
        quantile(ttfts, 0.9),
        quantile(tpots, 0.5),
        quantile(tpots, 0.9),
        quantile(gaps, 0.99),
        max(gaps, default=nan),
        tokens / span_s if span_s else nan,
        quantile(ttfts, 0.99),
        quantile(tpots, 0.99),
        quantile(gaps, 0.5),
        quantile(whole, 0.5),
        quantile(whole, 0.99),
    )


def requests_per_s(answers: Sequence[Answer]) -> float:
    """Requests per second of a set of answers; nan where nothing was answered."""
    span_s = _span_s(answers)
    good = sum(bool(answer.token_times_s) and answer.ended_well for answer in answers)
    return good / span_s if span_s else float("nan")


def _span_s(answers: Sequence[Answer]) -> float:
    """From the first arrival to the last token of all; nan without tokens."""
    ends_s = [answer.token_times_s[-1] for answer in answers if answer.token_times_s]
    return max(ends_s) - min(answer.arrival_s for answer in answers) if ends_s else float("nan")
