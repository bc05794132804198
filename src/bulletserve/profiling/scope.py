"""How much is measured on which kind of device: the range of loads, the number of points, how long each is run.

Knows nothing about what is fitted. On a GPU the range is that of serving, and all of it takes two minutes; on a CPU
it shrinks with the model, so that a small one is done within a minute and every step stays below about a second.
"""

from dataclasses import dataclass
from math import log2

from bulletserve.core.snapshot import MAX_BATCH_TOKENS, MAX_RANGE_TOKENS, Limits
from bulletserve.profiling.design import Counts, Reach
from bulletserve.profiling.engine_sources import GROWTH_TOKENS
from bulletserve.profiling.profiler import Pace

GPU_ROWS, GPU_CONTEXT, GPU_CHUNK = 256, 16384, 2048
GPU_PROMPT_SEATS = 24
GPU_SEATS = GPU_ROWS + GPU_PROMPT_SEATS
"""Seats that an engine needs for a full decode batch and prompts beside it."""

CPU_ROWS, CPU_CONTEXT, CPU_PROMPT = 8, 512, 128
CPU_GROWTH_TOKENS = 64
CPU_ROUNDS = 2
"""Other processes come and go on a CPU: what was slow in one round is probably fast in another."""

CPU_FLOPS_PER_CORE = 4e10
CPU_PROMPT_S = 0.5
"""A prompt on a CPU should take about so long, by a guess at its speed."""

_SHORTEST_PROMPT = 32

BRIEF = Counts(4, 4, 2, 2), Counts(0, 0, 0, 0), Pace(0.02, 0.05, steps=2, prompts=1)
"""What a first start has time for: points to fit, none to judge by."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What to measure: loads within `reach`, so many points to `fit` and `held_out`, each at `pace`.

    All points are run `rounds` times, where that is more than once some again, and the fastest counts.
    `growth_tokens`: how much longer a decode row may get while it is measured.
    """

    reach: Reach
    fit: Counts
    held_out: Counts
    pace: Pace
    growth_tokens: int
    rounds: int = 1


def gpu_scope(limits: Limits, max_model_len: int, *, quick: bool = False) -> Scope:
    """For a GPU: 80 samples and 30 runs to judge by; `quick`: a third of them."""
    slack = GROWTH_TOKENS // 2 + 2 * limits.block_size
    longest = max(1, min(GPU_CONTEXT, max_model_len - slack))
    reach = Reach(
        max_rows=max(1, min(GPU_ROWS, limits.max_seqs - GPU_PROMPT_SEATS)),
        min_context=min(128, longest),
        max_context=longest,
        min_prompt=min(64, longest),
        max_prompt=min(MAX_RANGE_TOKENS, longest),
        max_chunk=min(GPU_CHUNK, longest),
        cache_tokens=limits.total_blocks * limits.block_size,
        max_seats=limits.max_seqs,
        batch_tokens=MAX_BATCH_TOKENS,
        slack_tokens=slack,
    )
    fit, held_out = (Counts(8, 8, 4, 4), Counts(3, 3, 2, 3)) if quick else (Counts(18, 20, 12, 15), Counts(8, 8, 6, 8))
    pace = Pace(0.15, 0.5, 0.3, prompts=2) if quick else Pace(0.25, 1.0, 0.5, prompts=2)
    return Scope(reach, fit, held_out, pace, GROWTH_TOKENS)


def cpu_scope(
    limits: Limits, max_model_len: int, parameters: int, *, quick: bool = False, brief: bool = False
) -> Scope:
    """For a CPU and a model of `parameters` weights; `quick`: fewer points, one round; `brief`: only what a start has
    time for."""
    slack = CPU_GROWTH_TOKENS // 2 + 2 * limits.block_size
    longest = max(1, min(CPU_CONTEXT, max_model_len - slack))
    tokens = limits.lattice.total_sms * CPU_FLOPS_PER_CORE * CPU_PROMPT_S / (2 * parameters)
    prompt = min(CPU_PROMPT, 2 ** int(log2(max(tokens, _SHORTEST_PROMPT))), longest)
    reach = Reach(
        max_rows=max(1, min(CPU_ROWS, limits.max_seqs // 2)),
        min_context=min(32, longest),
        max_context=longest,
        min_prompt=min(16, prompt),
        max_prompt=prompt,
        max_chunk=min(64, prompt),
        cache_tokens=limits.total_blocks * limits.block_size,
        max_seats=limits.max_seqs,
        batch_tokens=2 * CPU_PROMPT,
        slack_tokens=slack,
    )
    fit, held_out = (Counts(5, 5, 3, 2), Counts(2, 2, 1, 1)) if quick else (Counts(8, 8, 4, 5), Counts(3, 3, 2, 2))
    pace = Pace(0.05, 0.1, steps=3, prompts=1) if quick else Pace(0.05, 0.2, steps=3, prompts=1)
    if brief:
        fit, held_out, pace = BRIEF
    return Scope(reach, fit, held_out, pace, CPU_GROWTH_TOKENS, 1 if quick or brief else CPU_ROUNDS)
