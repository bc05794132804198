"""The measured cells: each is a command of `bullet compare`, and all of them share one engine."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bulletserve.commands import compare
from bulletserve.compose import build_engine
from bulletserve.scheduler.policies import make_policy
from tests.end_to_end.test_processes import CONFIG

TINY = ["--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "400"]


@pytest.fixture
def cells(script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with two cells of a moment and a model to match."""
    module = script("cells")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "NEW", tmp_path / "new")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    lines = [json.dumps({"arrival": at, "prompt_tokens": 5 + at % 7, "output_tokens": 2}) for at in range(8)]
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    arms = module.at("chunked_prefill", "time_sliced")
    monkeypatch.setattr(
        module, "CELLS", {f"cell-{n}": module.Cell("list", "--tier middle", 4 * n, arms, rate=200) for n in (1, 2)}
    )
    return module


def words(folder: Path, *more: str) -> list[str]:
    given = [*more, "--lists", str(folder), "--runs", str(folder / "runs")]
    return [*given, "--", str(folder / "config.json"), *TINY]


def test_cells_share_an_engine_and_go_on_where_they_were(
    cells: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built = []

    def build(config: Any) -> Any:
        built.append(build_engine(config))
        return built[-1]

    monkeypatch.setattr(cells, "build_engine", build)
    assert cells.main(words(tmp_path)) == 0
    assert len(built) == 1
    documents = [json.loads((tmp_path / "new" / f"compare_cell_{n}.json").read_text()) for n in (1, 2)]
    assert all(document["metrics"]["list_time_sliced_at_200_tok_s"] > 0 for document in documents)
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*.json")}
    assert len(runs) == 4
    assert cells.main(words(tmp_path, "cell-2", "--time-limit", "100")) == 0
    assert runs == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*.json")}, "nothing ran again"
    assert capsys.readouterr().out.count("== cell-2") == 2


def test_a_cell_that_fails_or_has_no_time_leaves_the_others_alone(
    cells: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cells, "time", SimpleNamespace(monotonic=lambda: time.monotonic() - 100))
        assert cells.main(words(tmp_path, "--time-limit", "60")) == compare.INCOMPLETE
    missing = cells.Cell("missing", "--tier middle", 4, cells.at("bullet"), rate=200)
    monkeypatch.setattr(cells, "CELLS", {"broken": missing, **cells.CELLS})
    assert cells.main(words(tmp_path)) == 1
    assert "broken: " in capsys.readouterr().out
    assert (tmp_path / "new" / "compare_cell_2.json").exists()


def test_an_unknown_cell_is_named(cells: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cells.main(["cell-3"])
    assert "there is no cell cell-3; there are cell-1, cell-2" in capsys.readouterr().err


def test_every_cell_is_a_command(script: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    cells = script("cells")
    assert cells.main(["--list", "--neighbours"]) == 0
    assert capsys.readouterr().out.count("bullet compare ") == len(cells.CELLS)
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    for cell in cells.CELLS.values():
        options = parser.parse_args([*cells.ENGINE, *cell.words(Path("lists"), True)])
        assert [make_policy(policy) for policy in options.policies]
        assert cell.rate or len(options.around) == len(options.policies)
        assert Path(options.workload).stem in ("azure-code", "azure-conv", "arxiv-sum", "long-context")
        assert options.requests == (240 if cell.workload == "long-context" else 600), "docs/benchmarks.md, Goodput"
    assert cells.SHAPE.exists()
