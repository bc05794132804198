"""The measured device: the published points, and no surprises between and beyond them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.simulator import truth
from bulletserve.simulator.truth import H200Table, Work

TABLE = H200Table()
sms = st.integers(1, 132)
plain = settings(max_examples=200, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("column", range(8))
def test_published_points(column: int) -> None:
    at = truth._SMS[column]
    for tokens, row in zip(truth._PREFILL_TOKENS, truth._PREFILL_MS, strict=True):
        assert TABLE.alone_s(Work(prompt_tokens=tokens), at) == pytest.approx(row[column] / 1e3, rel=0.01)
    for (batch, context), row in zip(truth._DECODE_SHAPES, truth._DECODE_MS, strict=True):
        work = Work(rows=batch, context_tokens=batch * context)
        assert TABLE.alone_s(work, at) == pytest.approx(row[column] / 1e3, rel=0.15)


@given(tokens=st.integers(1, 40_000), more=st.integers(1, 5000), at=sms)
@plain
def test_more_prompt_tokens_take_longer(tokens: int, more: int, at: int) -> None:
    assert TABLE.alone_s(Work(tokens), at) <= TABLE.alone_s(Work(tokens + more), at)


@given(rows=st.integers(1, 512), context=st.integers(1, 4000), at=sms)
@plain
def test_more_rows_or_context_take_longer(rows: int, context: int, at: int) -> None:
    work = Work(rows=rows, context_tokens=rows * context)
    more_rows = Work(rows=rows + 1, context_tokens=rows * context)
    more_context = Work(rows=rows, context_tokens=rows * context + 1)
    assert 0 < TABLE.alone_s(work, at) < TABLE.alone_s(more_rows, at)
    assert TABLE.alone_s(work, at) < TABLE.alone_s(more_context, at)


@given(tokens=st.integers(1, 8192), earlier=st.integers(0, 30_000), at=sms)
@plain
def test_attending_to_earlier_tokens_takes_longer(tokens: int, earlier: int, at: int) -> None:
    assert TABLE.alone_s(Work(tokens, earlier), at) < TABLE.alone_s(Work(tokens, earlier + 100), at)


@given(tokens=st.integers(1, 8192), rows=st.integers(1, 256), context=st.integers(1, 4000), at=sms)
@plain
def test_a_mixed_step_is_cheaper_than_its_parts_and_dearer_than_the_dearer(
    tokens: int, rows: int, context: int, at: int
) -> None:
    prefill = TABLE.alone_s(Work(prompt_tokens=tokens), at)
    decode = TABLE.alone_s(Work(rows=rows, context_tokens=rows * context), at)
    mixed = TABLE.alone_s(Work(tokens, 0, rows, rows * context), at)
    assert mixed < prefill + decode
    assert mixed > max(prefill, decode) / 1.12


@given(share=st.floats(0.01, 1.0), tokens=st.integers(1, 8192), at=sms)
@plain
def test_layers_share_scales_a_step(share: float, tokens: int, at: int) -> None:
    whole = TABLE.alone_s(Work(tokens), at)
    assert TABLE.alone_s(Work(tokens, layers_share=share), at) == pytest.approx(share * whole)


def test_each_phase_slows_the_other() -> None:
    prefill, decode = Work(prompt_tokens=2048), Work(rows=32, context_tokens=32_000)
    assert TABLE.slowdown(decode, prefill) == pytest.approx(1.15)
    assert TABLE.slowdown(prefill, decode) == pytest.approx(1.10)
