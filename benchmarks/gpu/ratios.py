"""What sharing the card is worth: x, and co-runs against the best mixed batch that is as quick.

Knows nothing about how figures were measured. x = time alone on the whole card / time now, summed over both phases:
1.0 is what perfect time slicing gives.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alone:
    """Each phase alone on all SMs: ms of a decode step, prompt tokens a second."""

    decode_ms: float
    prefill_tok_s: float


@dataclass(frozen=True, slots=True)
class Shared:
    """Both phases at once: ms from one decode step to the next, prompt tokens a second, and x."""

    label: str
    decode_ms: float
    prefill_tok_s: float
    x: float


def shared(label: str, alone: Alone, decode_ms: float, prefill_tok_s: float) -> Shared:
    """The figures of one way to share, with its x."""
    return Shared(label, decode_ms, prefill_tok_s, alone.decode_ms / decode_ms + prefill_tok_s / alone.prefill_tok_s)


def best_within(found: Iterable[Shared], most_ms: float, by: Callable[[Shared], float]) -> Shared | None:
    """The greatest `by` among those whose decode step takes at most `most_ms`; None if no one is as quick."""
    return max((one for one in found if one.decode_ms <= most_ms), key=by, default=None)


def x_ratio(co_run: Shared, mixed: Iterable[Shared]) -> float:
    """Its x over that of the best mixed batch at no more than its decode step time; decode alone has an x of 1."""
    best = best_within(mixed, co_run.decode_ms, lambda one: one.x)
    return co_run.x / max(1.0, best.x if best else 1.0)


def prefill_ratio(co_run: Shared, mixed: Iterable[Shared]) -> float:
    """Its prompt tokens/s over those of the best mixed batch at no more than its decode step time; nan without one."""
    best = best_within(mixed, co_run.decode_ms, lambda one: one.prefill_tok_s)
    return co_run.prefill_tok_s / best.prefill_tok_s if best else float("nan")
