"""What is kept of a run: its figures, and what each scored request came to, so that any targets can be judged later.

Knows nothing about engines or where it is kept. Definitions: `telemetry` (latency, goodput, lanes).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np

from bulletserve.comparison.arm_run import ArmRun
from bulletserve.core.request import FinishReason
from bulletserve.core.slo import Slo
from bulletserve.telemetry.goodput import Met
from bulletserve.telemetry.lanes import joules_per_token, lane_use
from bulletserve.telemetry.latency import Answer, requests_per_s, summarise, within
from bulletserve.telemetry.metric_keys import summary_metrics

COLUMNS = "prompt_tokens, output_tokens, ttft_ms, tpot_ms, finish, answer"
ALWAYS = frozenset({"both_lanes_x", "preemptions_n", "refused_n", "window_s"})
"""Figures that every run has."""

_NONE = "-"


class Scored(NamedTuple):
    """One scored request. `ttft_s`: infinite without a token; `answer`: a digest of its tokens."""

    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float | None
    finish: str
    answer: str

    def meets(self, slo: Slo) -> bool:
        """As `Answer.meets`."""
        ended_well = self.finish in (FinishReason.LENGTH, FinishReason.STOP)
        return ended_well and self.output_tokens > 0 and within(slo, self.prompt_tokens, self.ttft_s, self.tpot_s)

    def line(self) -> str:
        """Its values in the order of COLUMNS; times to a microsecond."""
        ttft, tpot = (_NONE if s is None or s == inf else f"{s * 1e3:.3f}" for s in (self.ttft_s, self.tpot_s))
        return f"{self.prompt_tokens}, {self.output_tokens}, {ttft}, {tpot}, {self.finish or _NONE}, {self.answer}"

    @classmethod
    def from_line(cls, line: str) -> "Scored":
        """The inverse of `line`. Raises `ValueError`."""
        prompt, output, ttft, tpot, finish, answer = line.split(", ")
        return cls(
            int(prompt),
            int(output),
            inf if ttft == _NONE else float(ttft) / 1e3,
            None if tpot == _NONE else float(tpot) / 1e3,
            "" if finish == _NONE else finish,
            answer,
        )


@dataclass(frozen=True)
class Measured:
    """One run of one arm. `figures`: those that are known, by names that end in their unit; `partitions`: share of the
    time by partition."""

    policy: str
    rate: float
    round: int
    figures: Mapping[str, float]
    partitions: Mapping[str, float]
    scored: Sequence[Scored]

    def met(self, slo: Slo) -> Met:
        """Which of the scored requests met these targets."""
        return np.array([one.meets(slo) for one in self.scored], dtype=np.bool_)

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the figures."""
        return {
            "run": {"policy": self.policy, "rate_req_s": self.rate, "round": self.round},
            "partitions": dict(self.partitions),
            "scored": {"columns": COLUMNS, "lines": [one.line() for one in self.scored]},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Measured":
        """Of a whole document. Raises `ValueError` or another of the common errors of Python for one that is none."""
        run, scored = document["run"], document["scored"]
        if scored["columns"] != COLUMNS:
            raise ValueError(f"columns {scored['columns']!r}")
        figures = _numbers(document["metrics"])
        if lacks := ALWAYS - figures.keys():
            raise ValueError(f"metrics without {', '.join(sorted(lacks))}")
        return cls(
            str(run["policy"]),
            float(run["rate_req_s"]),
            int(run["round"]),
            figures,
            _numbers(document["partitions"]),
            tuple(map(Scored.from_line, scored["lines"])),
        )


def _numbers(plain: Mapping[str, Any]) -> dict[str, float]:
    """By name, all finite. Raises `ValueError`."""
    found = {str(name): float(value) for name, value in plain.items()}
    if not all(map(isfinite, found.values())):
        raise ValueError("a number that is not finite")
    return found


def measured(run: ArmRun, rate: float, number: int, scored: Sequence[int]) -> Measured:
    """The figures of a run. Latencies are of the scored requests, all else of the whole window."""
    chosen = [run.answers[at] for at in scored]
    window_s = run.end_s - run.first_s
    summary = replace(summarise(chosen), tokens_per_s=summarise(run.answers).tokens_per_s)
    lanes = lane_use(run.spans, run.first_s, run.end_s)
    figures = summary_metrics(summary) | {
        "req_s": requests_per_s([one for one in run.answers if one.finish]),
        "both_lanes_x": run.both_lanes_s / window_s,
        "mixed_steps_x": lanes.mixed_share,
        "switches_per_s": lanes.switches_per_s,
        "joules_per_token_j": joules_per_token(run.watts, summary.tokens_per_s),
        "power_w": run.watts,
        "clock_mhz": run.mhz,
        "others_x": run.others_x,
        "preemptions_n": float(run.preemptions),
        "refused_n": float(sum(one.finish is FinishReason.REFUSED for one in run.answers)),
        "window_s": window_s,
    }
    figures |= {f"forecast_error_{kind}_x": error for kind, error in run.forecast_errors.items()}
    figures = {name: round(value, 6) for name, value in figures.items() if isfinite(value)}  # as a result holds them
    partitions = {name: round(share, 6) for name, share in lanes.partitions.items()}
    return Measured(run.policy, rate, number, figures, partitions, tuple(map(_scored, chosen)))


def _scored(answer: Answer) -> Scored:
    tokens = np.array(answer.tokens, dtype=np.int64).tobytes()
    digest = blake2b(tokens, digest_size=6).hexdigest()
    # As it will be read again, so that a run is judged alike before and after it was kept.
    return Scored.from_line(
        Scored(
            answer.prompt_tokens, len(answer.token_times_s), answer.ttft_s, answer.tpot_s, str(answer.finish), digest
        ).line()
    )
