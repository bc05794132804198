"""Points of the co-run benchmark as samples: the right step, share, time and counters."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROMPT = StepShape.prefill([(2048, 0)], 32, 1)
ROWS = StepShape.decode(4, 4 * 2049, 32)


@pytest.fixture
def samples_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.syspath_prepend(FOLDER)
    found: Callable[..., Any] = importlib.import_module("corun_samples").samples_of
    return found


def test_each_figure_becomes_what_was_run(samples_of: Callable[..., Any]) -> None:
    metrics = {
        "alone_4x2048_decode_ms": 5.0, "alone_4x2048_decode_w": 470.0, "alone_4x2048_decode_mhz": 1980.0,
        "alone_4x2048_prefill_tok_s": 40960.0, "alone_4x2048_prefill_w": 700.0, "alone_4x2048_prefill_mhz": 1500.0,
        "mixed_4x2048_c512_decode_ms": 15.0, "mixed_4x2048_c512_prefill_tok_s": 34000.0, "mixed_4x2048_c512_w": 690.0,
        "corun_4x2048_d32_p100_decode_ms": 8.0, "corun_4x2048_d32_p100_prefill_tok_s": 20480.0,
        "corun_4x2048_d32_p100_vs_mixed_x": 1.2,
    }  # fmt: skip
    prefill, decode, mixed, beside, rows = samples_of(metrics, 32, 132)
    assert (prefill.step, prefill.partition, prefill.seconds) == (PROMPT, Partition(132, 0), 0.05)
    assert (prefill.watts, prefill.clock_mhz) == (700.0, 1500.0)
    assert (decode.step, decode.partition, decode.seconds, decode.watts) == (ROWS, Partition(0, 132), 0.005, 470.0)
    assert (mixed.partition, mixed.alongside, mixed.watts, mixed.clock_mhz) == (Partition(132, 0), None, 690.0, None)
    assert (mixed.step.prefill_tokens, mixed.step.decode_rows, mixed.step.decode_context) == (512, 4, 4 * 2049)
    assert mixed.step.prefill_context == (512 + 1024 + 1536 + 2048) // 4
    assert (beside.step, beside.alongside, beside.partition, beside.seconds) == (PROMPT, ROWS, Partition(100, 32), 0.1)
    assert (rows.step, rows.alongside, rows.seconds) == (ROWS, PROMPT, 0.008)


@given(chunk=st.integers(1, 4096))
def test_mixed_steps_compute_all_pairs_of_their_prompts(chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        step = importlib.import_module("corun_samples").mixed_step(chunk, 4, 4 * 2049, 32)
    assert step.prefill_pairs == pytest.approx(chunk * 2049 / 2, abs=1)
    assert chunk <= step.prefill_context <= 2048 * (2 + chunk // 2048)
