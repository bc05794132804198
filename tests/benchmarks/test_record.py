"""Documents of results: they name the commit that the environment names, and people see what is in them."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bulletserve.agreement import Agreement
from bulletserve.machine import COMMIT_VARIABLE, code_commit
from bulletserve.results import write_result
from tests.benchmarks.conftest import BENCHMARKS

Script = Callable[[str], Any]


@pytest.fixture
def commit(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(COMMIT_VARIABLE, "0123456789ab")
    code_commit.cache_clear()
    yield "0123456789ab"
    code_commit.cache_clear()


def test_every_document_names_the_commit_of_the_environment(commit: str, script: Script, tmp_path: Path) -> None:
    """A tree that was copied into another repository would name that one's."""
    of_benchmark = script("record").record("found", {"x": 1.0}, folder=tmp_path)
    write_result(tmp_path / "bench.json", "bench", {"x": 1.0}, {})
    assert [json.loads(path.read_text())["commit"] for path in (of_benchmark, tmp_path / "bench.json")] == [commit] * 2


def test_figures_are_told_and_recorded(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("record")
    monkeypatch.setitem(module.record.__kwdefaults__, "folder", tmp_path)
    module.tell("found", {"gap_ms": 12.3456, "longest_gap_ms": 1234.5})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [["gap_ms", "12.346"], ["longest_gap_ms", "1234.500"]]
    assert json.loads(Path(lines[2].removeprefix("written: ")).read_text())["metrics"]["gap_ms"] == 12.3456


def test_no_run_changes_a_document_that_pages_refer_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scripts in a folder of their own, so that nothing is written into this tree."""
    for name in ("agreement", "record"):
        shutil.copy(BENCHMARKS / f"{name}.py", tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
    kept = tmp_path / "results" / "agreement.json"
    kept.parent.mkdir()
    kept.write_text("of the page")
    monkeypatch.syspath_prepend(str(tmp_path))
    module: Any = import_module("agreement")
    figures = dict.fromkeys(("ttft_mean", "tpot_mean"), 0.5)
    monkeypatch.setattr(module, "agreement", lambda path: Agreement("bullet", 3, figures, figures))
    monkeypatch.setattr(sys, "argv", ["agreement.py", "other.record"])
    module.main()
    written = Path(capsys.readouterr().out.rpartition("wrote ")[2].strip())
    assert json.loads(written.read_text())["metrics"]["other_ttft_mean_measured_ms"] == 500.0
    assert kept.read_text() == "of the page" and kept.parent not in written.parents
    ignored = (BENCHMARKS.parent / ".gitignore").read_text().split()
    assert f"benchmarks/{written.relative_to(tmp_path).parts[0]}/" in ignored
    for name in ("agreement", "record"):
        sys.modules.pop(name)
