"""The goodput table: runs are kept and taken up again, budgets are chosen as defined, losses are named."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bulletserve.estimator.calibration import Provenance, datasheet
from bulletserve.telemetry.goodput import Curve, goodput
from tests.simulator.devices import LLAMA_8B

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("goodput_simulated")


@pytest.fixture
def jobs(table: Any, tmp_path: Path) -> list[Any]:
    sheet = datasheet("NVIDIA H200", 132)
    assert sheet is not None
    calibration, workload = tmp_path / "h200.json", tmp_path / "short.jsonl"
    replace(sheet, provenance=Provenance("datasheet", shape=LLAMA_8B)).save(calibration)
    row = {"prompt_tokens": 500, "output_tokens": 3}
    workload.write_text("".join(json.dumps(row | {"arrival": float(i)}) + "\n" for i in range(240)))
    return [table.Job(str(calibration), str(workload), "time_sliced", seed, 0.1) for seed in (0, 1)]


def test_runs_are_kept_and_taken_up_again(
    table: Any, jobs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.jsonl"
    curves = table.all_curves(jobs[:1], path, 1)
    assert len(curves) == 3 and all(goodput(curve) > 5 for curve in curves.values())

    ran: list[Any] = []
    plain = table.curves_of

    class Here:
        """A pool of this process."""

        def __init__(self, processes: int) -> None: ...
        def __enter__(self) -> "Here":
            return self

        def __exit__(self, *_: object) -> None: ...
        def imap_unordered(self, work: Any, listed: list[Any]) -> Iterator[Any]:
            ran.extend(listed)
            return map(plain, listed)

    monkeypatch.setattr(table, "get_context", lambda kind: type("Context", (), {"Pool": Here}))
    again = table.all_curves(jobs, path, 1)
    assert ran == jobs[1:], "only what was missing is run"
    for key, curve in curves.items():
        assert again[key].keys() == curve.keys()
        assert all(np.array_equal(again[key][rate], flags) for rate, flags in curve.items())
    cells = table.by_cell(jobs, again)
    assert [tier for _, tier in cells] == ["loose", "middle", "tight"]
    assert all(len(curves) == 2 for arms in cells.values() for curves in arms.values())

    monkeypatch.setattr(table, "code_digest", lambda *_: "other code")
    ran.clear()
    table.all_curves(jobs[:1], path, 1)
    assert ran == jobs[:1], "what other code made is made again"


def test_a_run_depends_on_its_own_policys_file_and_no_other(table: Any, jobs: list[Any]) -> None:
    first = jobs[0]
    assert replace(first, policy="static_split").fingerprint != first.fingerprint
    assert replace(first, policy="time_sliced:batch_tokens=5").fingerprint == first.fingerprint
    assert replace(first, workload=first.calibration).fingerprint != first.fingerprint


def sharp(edge: float) -> list[Curve]:
    """All meet their targets up to a rate, none above."""
    return [{edge: np.full(400, True), edge * 1.001: np.full(400, False)}]


def test_budgets_ratios_and_losses(table: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = import_module("goodput_report")
    small, large = report.CHUNKED[0], report.CHUNKED[1]
    found = {
        ("a", "loose"): {small: sharp(9.0), large: sharp(10.0), "time_sliced": sharp(5.0), "bullet": sharp(12.0)},
        ("a", "tight"): {small: sharp(4.0), large: sharp(2.0), "time_sliced": sharp(5.0), "bullet": sharp(4.5)},
    }
    metrics = report.report(found, report.Options(ours="bullet"))
    shown = capsys.readouterr().out
    assert metrics["goodput_a_loose_bullet_req_s"] == pytest.approx(12.0, rel=0.001)
    assert metrics["ratio_a_loose_bullet_x"] == pytest.approx(12 / 9, rel=0.002), "one budget for the whole workload"
    assert metrics["mean_ratio_bullet_x"] == pytest.approx((12 / 9 * 4.5 / 4) ** 0.5, rel=0.002)
    assert metrics["against_best_a_tight_bullet_x"] == pytest.approx(0.9, rel=0.002)
    assert "by more than the interval: ['a tight']" in shown
    metrics = report.report(found, report.Options(ours="bullet", by_cell=True))
    assert metrics["ratio_a_loose_bullet_x"] == pytest.approx(1.2, rel=0.002)
    metrics = report.report(found, report.Options(base="time_sliced"))
    assert metrics["ratio_a_tight_bullet_x"] == pytest.approx(0.9, rel=0.002)


def test_lists_that_are_not_there_are_one_line_with_the_fix(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "azure-conv.jsonl").touch()
    words = ["--workloads", tmp_path, "--only", "azure-code", "azure-conv", "--runs", tmp_path / "runs"]
    monkeypatch.setattr("sys.argv", ["goodput_simulated.py", *map(str, words)])
    with pytest.raises(SystemExit, match="2"):
        table.main()
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path} has no azure-code.jsonl. " in said
    assert f"python benchmarks/request_lists.py --traces FOLDER --out {tmp_path}" in said
    assert not (tmp_path / "runs").exists()


def test_lists_are_made_of_the_traces_that_are_there(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "azure_code_2023.csv").write_text("ContextTokens,GeneratedTokens\n100,20\n")
    monkeypatch.setattr("sys.argv", ["request_lists.py", "--traces", str(tmp_path), "--out", str(tmp_path / "lists")])
    import_module("request_lists").main()
    assert f"no azure-conv.jsonl: {tmp_path / 'azure_conv_2023.csv'} is not there" in capsys.readouterr().out
    made = table.lists_in(tmp_path / "lists", ["azure-code", "long-context"])
    assert [len(Path(path).read_text().splitlines()) for path in made] == [600, 600]
