"""The packaged model through the whole engine: transformers' greedy tokens under every policy, alone and together."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from bulletserve.comparison.arm_run import TimedPrompt, run_arm
from bulletserve.compose import Engine, build_engine
from bulletserve.core.config import EngineConfig
from tests.models.smollm2 import TOKENS, expected_tokens, prompt_ids

POLICIES = ("time_sliced", "chunked_prefill:budget=20", "static_split")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = build_engine(EngineConfig(dtype="float32"))
    yield engine
    engine.close()


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_tokens_equal_transformers(engine: Engine, policy: str) -> None:
    """The second and third prompt arrive while the first is decoding, and a long fourth one keeps prefill busy."""
    prompts = [TimedPrompt(0.2 * number, tuple(ids), TOKENS) for number, ids in enumerate(prompt_ids())]
    filler = TimedPrompt(0.3, tuple(range(1000, 1400)), 2)
    run = run_arm(engine, policy, [*prompts, filler])
    assert [answer.tokens for answer in run.answers[:3]] == expected_tokens()


@pytest.mark.model
@pytest.mark.slow
def test_greedy_tokens_equal_transformers_when_preempted(engine: Engine) -> None:
    """Nine blocks for three prompts that need five each."""
    small = replace(engine, limits=replace(engine.limits, total_blocks=9))
    prompts = [TimedPrompt(0.0, tuple(ids), TOKENS) for ids in prompt_ids()]
    run = run_arm(small, "static_split", prompts)
    assert run.preemptions > 0
    assert [answer.tokens for answer in run.answers] == expected_tokens()
