"""Choices of matrix products: how work is divided, and the table that remembers what measured best."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulletserve.core.errors import ConfigError
from bulletserve.kernels.cuda.matmul_choice import (
    CUBLAS,
    CUBLASLT,
    Cell,
    Choice,
    ChoiceTable,
    TableKey,
    default_path,
    most_streamed_tiles,
    schedule,
)

KEY = TableKey.of("NVIDIA H200", 132, "torch.bfloat16")
OWN = Choice("triton", 128, 256, 64, 8, 4, stream="tail", chunks=4)


def table() -> ChoiceTable:
    table = ChoiceTable(KEY)
    table.put(4096, 4096, 16, 32, Cell(CUBLASLT, OWN))
    table.put(4096, 4096, 64, 32, Cell(CUBLASLT, CUBLAS))
    table.put(4096, 4096, 16, 100, Cell(OWN, OWN))
    return table


@given(
    stream=st.sampled_from(["none", "tail", "split"]),
    block_m=st.sampled_from([16, 64, 128]),
    per_sm=st.integers(1, 2),
    rows=st.integers(1, 9000),
    cols=st.integers(1, 16000).map(lambda eighth: 8 * eighth),
    inner=st.integers(1, 2000).map(lambda eighth: 8 * eighth),
    sms=st.integers(1, 132),
)
def test_every_program_has_work_and_counters_suffice(
    stream: str, block_m: int, per_sm: int, rows: int, cols: int, inner: int, sms: int
) -> None:
    choice = Choice("triton", block_m, 128, 64, 4, 3, stream=stream, per_sm=per_sm)  # type: ignore[arg-type]
    programs, shared = schedule(choice, rows, cols, inner, sms)
    tiles, k_tiles = -(-rows // block_m) * -(-cols // 128), -(-inner // 64)
    assert 1 <= programs <= sms * per_sm
    assert 0 <= shared <= min(tiles, most_streamed_tiles(sms, per_sm))
    assert shared * k_tiles >= programs or tiles - shared >= programs or shared == 0
    assert stream != "none" or shared == 0


def test_a_split_gives_every_tile_equally_many_programs() -> None:
    choice = Choice("triton", 16, 64, 128, 4, 5, True, "split")
    assert schedule(choice, 16, 4096, 4096, 132) == (128, 64)


def test_the_tail_shares_only_what_whole_waves_leave() -> None:
    assert schedule(OWN, 2048, 4096, 4096, 100) == (100, 56)
    assert schedule(OWN, 2048, 4096, 4096, 128) == (128, 0)
    assert schedule(OWN, 2048, 4096, 4096, 125) == (125, 131)  # six tiles alone would be cut too finely


def test_the_bucket_that_holds_the_rows_and_the_nearest_share_decide() -> None:
    choose = table().choose
    assert choose(4096, 4096, 1, 32, capturing=True) == CUBLASLT
    assert choose(4096, 4096, 16, 32, capturing=False) == OWN
    assert choose(4096, 4096, 17, 32, capturing=False) == CUBLAS
    assert choose(4096, 4096, 9000, 32, capturing=False) == CUBLAS
    assert choose(4096, 4096, 8, 84, capturing=True) == OWN
    assert choose(4096, 4096, 8, 48, capturing=True) == CUBLASLT


def test_the_unknown_falls_back_to_cublas() -> None:
    assert table().choose(8, 8, 1, 32, capturing=True) == CUBLAS
    assert ChoiceTable(KEY).choose(4096, 4096, 1, 32, capturing=True) == CUBLAS


def test_only_cublaslt_needs_a_capture() -> None:
    assert [choice.capture_only for choice in (CUBLAS, CUBLASLT, OWN)] == [False, True, False]


def test_what_is_put_later_is_seen_although_a_choice_was_made_before() -> None:
    changed = table()
    assert changed.choose(4096, 4096, 8, 32, capturing=True) == CUBLASLT
    changed.put(4096, 4096, 8, 32, Cell(OWN, OWN))
    assert changed.choose(4096, 4096, 8, 32, capturing=True) == OWN


def test_merging_joins_shares_and_buckets_and_refuses_another_key() -> None:
    both, other = table(), ChoiceTable(KEY)
    other.put(4096, 4096, 512, 32, Cell(OWN, OWN))
    both.merge(other)
    assert both.choose(4096, 4096, 512, 32, capturing=False) == OWN
    assert both.choose(4096, 4096, 64, 32, capturing=False) == CUBLAS
    assert both.choices(4096, 4096) == [CUBLASLT, OWN, CUBLAS]
    with pytest.raises(ConfigError, match="merge"):
        both.merge(ChoiceTable(replace(KEY, gpu="another")))


def test_a_saved_table_comes_back_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.json"
    table().save(path)
    assert ChoiceTable.load(path, KEY) == table()
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


def test_a_table_of_another_machine_or_kernel_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table().save(path)
    for field in ("gpu", "dtype", "torch", "triton", "kernels"):
        assert ChoiceTable.load(path, replace(KEY, **{field: "another"})) is None
    assert ChoiceTable.load(path, replace(KEY, sms=114)) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": {}, "cells": []}', "\x00"])
def test_a_damaged_table_is_not_loaded(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    assert ChoiceTable.load(path, KEY) is None
    path.write_text(text)
    assert ChoiceTable.load(path, KEY) is None
    with pytest.raises(ConfigError):
        ChoiceTable.from_json(text)


def test_a_choice_with_fields_we_do_not_know_is_refused() -> None:
    document = json.loads(table().to_json())
    document["cells"][0]["eager"]["colour"] = 1
    with pytest.raises(ConfigError):
        ChoiceTable.from_json(json.dumps(document))


def test_tables_live_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_path(KEY)
    assert path.parent == tmp_path / "bulletserve"
    assert path != default_path(replace(KEY, dtype="torch.float16"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_path(KEY).parent == tmp_path / "home" / ".cache" / "bulletserve"
