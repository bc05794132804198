"""The memory budget: never more than is free, never more than allowed, and an error that says what helps."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulletserve.core.errors import ConfigError
from bulletserve.engine.memory import GIB, MARGIN_BYTES, MemoryBudget, PartitionMemory

H200 = MemoryBudget(
    total_bytes=140 * GIB,
    free_at_start_bytes=139 * GIB,
    free_now_bytes=122 * GIB,
    weights_bytes=15 * GIB,
    workspace_bytes=GIB,
    utilization=0.9,
    block_bytes=2 * 2**20,
    block_size=16,
    partitions=tuple(PartitionMemory(f"{132 - n} + {n} SMs", 40, 8 * 2**20) for n in (16, 32, 64)),
)


@st.composite
def budgets(draw: st.DrawFn) -> MemoryBudget:
    total = draw(st.integers(1 * GIB, 200 * GIB))
    free_at_start = draw(st.integers(0, total))
    free_now = draw(st.integers(0, total))  # others come and go: it may even have risen
    return MemoryBudget(
        total,
        free_at_start,
        free_now,
        weights_bytes=draw(st.integers(0, 100 * GIB)),
        workspace_bytes=draw(st.integers(0, 4 * GIB)),
        utilization=draw(st.floats(0.01, 1.0)),
        block_bytes=draw(st.integers(1024, 64 * 2**20)),
        block_size=draw(st.sampled_from([1, 16, 256])),
        partitions=tuple(
            PartitionMemory("some", draw(st.integers(0, 60)), draw(st.integers(0, 2**26)))
            for _ in range(draw(st.integers(0, 7)))
        ),
        spare_blocks=draw(st.integers(0, 2)),
    )


def made_bytes(budget: MemoryBudget) -> int:
    """What is yet to be taken by an engine that follows the budget."""
    cache = (budget.total_blocks + budget.spare_blocks) * budget.block_bytes
    return cache + budget.graph_bytes


@given(budgets())
def test_never_promises_more_than_is_free_or_allowed(budget: MemoryBudget) -> None:
    if budget.total_blocks:
        assert made_bytes(budget) <= budget.free_now_bytes - MARGIN_BYTES
        ours = budget.weights_bytes + budget.workspace_bytes + budget.overhead_bytes + made_bytes(budget)
        assert budget.block_room_bytes <= budget.kv_bytes
        assert ours <= budget.utilization * budget.total_bytes
        assert ours <= budget.free_at_start_bytes
        one_more = ours + budget.block_bytes
        assert one_more > budget.limit_bytes or made_bytes(budget) + budget.block_bytes > (
            budget.free_now_bytes - MARGIN_BYTES
        )


@given(budgets(), st.floats(0.01, 1.0))
def test_more_utilization_never_gives_less(budget: MemoryBudget, utilization: float) -> None:
    low, high = sorted((budget.utilization, utilization))
    assert replace(budget, utilization=low).total_blocks <= replace(budget, utilization=high).total_blocks


@given(budgets(), st.integers(0, 8 * GIB))
def test_what_others_hold_is_never_ours(budget: MemoryBudget, more_bytes: int) -> None:
    crowded = replace(
        budget,
        free_at_start_bytes=max(0, budget.free_at_start_bytes - more_bytes),
        free_now_bytes=max(0, budget.free_now_bytes - more_bytes),
    )
    assert crowded.total_blocks <= budget.total_blocks


@given(budgets(), st.integers(1, 10**6))
def test_a_check_passes_exactly_when_the_tokens_fit(budget: MemoryBudget, tokens: int) -> None:
    fits = budget.total_blocks * budget.block_size >= tokens
    try:
        budget.check(tokens)
        assert fits
    except ConfigError:
        assert not fits


@given(budgets(), st.integers(1, 10**6))
def test_the_fixes_of_an_error_fix_it(budget: MemoryBudget, tokens: int) -> None:
    try:
        budget.check(tokens)
    except ConfigError as error:
        message = str(error)
    else:
        return
    if wanted := re.search(r"raise --gpu-memory-utilization from \S+ to ([\d.]+)", message):
        assert 0 < float(wanted[1]) <= 1
        replace(budget, utilization=float(wanted[1])).check(tokens)
    if shorter := re.search(r"use --max-model-len (\d+) or less", message):
        budget.check(int(shorter[1]))
    if "--decode-shares" in message:
        replace(budget, partitions=()).check(tokens)


@given(budgets())
def test_any_budget_can_be_described(budget: MemoryBudget) -> None:
    assert len(budget.describe().splitlines()) == 7 + len(budget.partitions)


def test_an_h200_with_an_8b_model() -> None:
    # 126 GiB allowed; 15 weights, 1 CUDA's own, 1 workspaces, 120 graphs of 8 MiB = 0.9375 GiB
    assert H200.kv_bytes == int(0.9 * 140 * GIB) - 17 * GIB - 960 * 2**20
    assert H200.total_blocks == H200.kv_bytes // (2 * 2**20) - 1
    lines = H200.describe().splitlines()
    assert lines[0] == (
        "GPU memory: 140.0 GiB, 1.0 GiB of it taken before, at most 126.0 GiB for this engine "
        "(--gpu-memory-utilization 0.9)"
    )
    assert "  KV cache    108.1 GiB: 55327 blocks of 16 tokens, 885232 tokens" in lines
    assert "    100 + 32 SMs: 40 graphs, 320 MiB" in lines
    assert lines[-1] == "  left free   13.0 GiB"


def test_measured_graphs_and_a_smaller_cache_are_reported_as_they_are() -> None:
    text = H200.describe(total_blocks=1023, measured=[PartitionMemory("all", 3, GIB)])
    assert "2.0 GiB: 1023 blocks of 16 tokens, 16368 tokens" in text
    assert "3.0 GiB measured for 3 graphs" in text
    assert text.endswith("left free   117.0 GiB")


def test_a_full_card_names_who_holds_it() -> None:
    crowded = replace(H200, free_at_start_bytes=20 * GIB, free_now_bytes=4 * GIB)
    with pytest.raises(ConfigError, match=r"end other processes on this GPU \(they hold up to 120\.0 GiB\)"):
        crowded.check(131072)


def test_a_small_share_names_the_share_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"raise --gpu-memory-utilization from 0\.1 to 0\.25"):
        replace(H200, utilization=0.1).check(131072)


def test_a_model_that_does_not_fit_says_so() -> None:
    small = replace(
        H200, total_bytes=24 * GIB, free_at_start_bytes=24 * GIB, free_now_bytes=GIB, weights_bytes=22 * GIB
    )
    with pytest.raises(ConfigError, match="take a smaller model or a GPU with more memory"):
        small.check(131072)
