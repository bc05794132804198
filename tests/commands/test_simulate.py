"""`bullet simulate` and `bullet replay` from the command line to their files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from bulletserve import cli
from bulletserve.calibrations import samples_path
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.samples import Sample
from bulletserve.estimator.calibration import Provenance, datasheet
from bulletserve.measurements import Measurements
from tests.simulator.devices import LLAMA_8B

ARMS = ["--policy", "chunked_prefill:budget=512", "--policy", "static_split:decode_fraction=0.25"]


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    """A calibration file of an H200, with two samples beside it."""
    sheet = datasheet("NVIDIA H200", 132)
    assert sheet is not None
    path = tmp_path / "h200.json"
    replace(sheet, provenance=Provenance("datasheet", shape=LLAMA_8B)).save(path)
    prefill = Sample(StepShape.prefill([(2048, 0)], 32, 1), Partition(132, 0), None, 0.050)
    decode = Sample(StepShape.decode(32, 65536, 32), Partition(0, 132), None, 0.007)
    Measurements({}, LLAMA_8B, 2, (prefill,), (decode,)).save(samples_path(path))
    return path


def bullet(*words: object) -> int:
    return cli.main([str(word) for word in words])


def test_policies_at_rates_become_tables_a_document_pictures_and_a_trace(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, document = tmp_path / "report", tmp_path / "out.json"
    words = ["simulate", "--calibration", calibration, "--workload", "azure-conv", *ARMS, "--rate", "4,8"]
    assert bullet(*words, "--requests", 30, "--json", document, "--report", report) == 0
    shown = capsys.readouterr().out
    assert "truth: each constant within 10%" in shown and "chunked_prefill:budget=512" in shown
    found = json.loads(document.read_text())
    assert f"drawn: {report / 'latency.png'} and latency.svg" in shown
    assert found["name"] == "simulate_azure-conv" and found["hardware"]["simulated"] == "NVIDIA H200"
    assert "prefill x" in found["truth"] and found["targets"]["ttft_s"] == 0.3
    assert {"command", "versions", "commit", "date"} <= found.keys()
    metrics = found["metrics"]
    assert 0 < metrics["azure_conv_chunked_prefill_budget_512_at_4_met_x"] <= 1
    assert metrics["azure_conv_chunked_prefill_budget_512_at_4_both_lanes_x"] == 0
    assert metrics["azure_conv_static_split_decode_fraction_0_25_at_8_both_lanes_x"] > 0.1
    assert all(key.rpartition("_")[2] in ("x", "ms", "s") for key in metrics)
    for name in ("attainment", "latency", "lanes"):
        with Image.open(report / f"{name}.png") as picture:
            assert min(picture.size) > 300
            assert len(picture.convert("L").histogram()) - picture.convert("L").histogram().count(0) > 20
        assert "<svg" in (report / f"{name}.svg").read_text()
    trace = json.loads((report / "trace.json").read_text())
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names.count("decode lane") == 4 and any("at 8 req/s" in name for name in names)


def test_the_same_seed_gives_the_same_figures_and_another_one_others(calibration: Path, tmp_path: Path) -> None:
    def figures(*more: object) -> dict[str, float]:
        path = tmp_path / "out.json"
        words = ["--workload", "azure-code", "--policy", "time_sliced", "--rate", 5, "--requests", 20, "--json", path]
        assert bullet("simulate", "--calibration", calibration, *words, *more) == 0
        found: dict[str, float] = json.loads(path.read_text())["metrics"]
        return found

    assert figures() == figures()
    assert figures() != figures("--seed", 1)
    assert figures() != figures("--perturb", 0)
    assert figures("--truth", "table") != figures("--perturb", 0), "two measured points are in the table"


def test_goodput_is_searched_and_compared(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "list.jsonl"
    row = {"prompt_tokens": 700, "output_tokens": 5}
    path.write_text("".join(json.dumps(row | {"arrival": i * 0.9}) + "\n" for i in range(240)))
    document = tmp_path / "out.json"
    words = ["--workload", path, "--policy", "time_sliced", "--policy", "chunked_prefill:budget=256", "--goodput"]
    assert bullet("simulate", "--calibration", calibration, *words, "--tier", "middle", "--json", document) == 0
    shown = capsys.readouterr().out
    assert "TPOT 12 ms" in shown and "ratios to time_sliced" in shown
    metrics = json.loads(document.read_text())["metrics"]
    goodput = metrics["goodput_list_time_sliced_req_s"]
    assert 5 < goodput < 200
    assert metrics["goodput_list_time_sliced_low_req_s"] <= goodput <= metrics["goodput_list_time_sliced_high_req_s"]
    assert metrics["goodput_list_chunked_prefill_budget_256_req_s"] > goodput, "small chunks keep 12 ms for longer"
    visited = [value for key, value in metrics.items() if "time_sliced_met_at" in key]
    assert min(visited) < 0.9 <= max(visited)


def test_a_recorded_simulation_is_replayed(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    words = ["--workload", "azure-conv", "--requests", 12, "--rate", 5, "--policy", "chunked_prefill:budget=512"]
    assert bullet("simulate", "--calibration", calibration, *words, "--record", path) == 0
    assert bullet("replay", path) == 0
    shown = capsys.readouterr().out
    assert ", 0 differences" in shown and "no end" not in shown
    assert bullet("replay", path, "--policy", "chunked_prefill:budget=400", "--show", 1) == 0
    shown = capsys.readouterr().out
    assert shown.count("recorded  ") == 1 and "bullet simulate" in shown and ", 0 differences" not in shown

    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    assert bullet("replay", path) == 0
    assert "the record has no end" in capsys.readouterr().out
    path.write_bytes(b"".join(lines[:40]) + lines[40][:30])
    assert bullet("replay", path) == 1
    captured = capsys.readouterr()
    assert "line 41: cut off" in captured.err and "39 turns" in captured.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a --rate"),
        (["--rate", "5", "--record", "run", "--policy", "time_sliced", "--policy", "static_split"], "one policy"),
        (["--goodput", "--record", "run"], "one policy at one --rate"),
        (["--rate", "5", "--policy", "time_sliced", "--policy", "time_sliced"], "named once"),
        (["--rate", "5", "--policy", "none_such"], "no policy is called"),
        (["--rate", "5", "--tier", "tight", "--tpot-slo-ms", "5"], "leave --ttft-slo-ms"),
        (["--rate", "5", "--tpot-slo-ms", "-5"], "must be a number of milliseconds"),
        (["--rate", "5", "--perturb", "2"], "share from 0 to 1"),
        (["--rate", "5", "--cache-tokens", "99999999999999"], "at most 268435456 tokens"),
        (["--rate", "5", "--max-num-seqs", "99999999999999"], "4096 seats"),
        (["--rate", "5", "--json", "/nowhere/x.json"], "folder that can be written"),
        (["--rate", "5", "--workload", "none"], "no workload 'none'"),
        (["--rate", "5", "--calibration", "none"], "shipped are"),
        (["--goodput", "--requests", "50"], "600 requests"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    calibration: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ["--policy", "time_sliced"] if "--policy" not in words else []
    given = ["simulate", "--calibration", calibration, "--workload", "azure-code", *plain, *words]
    assert bullet(*given) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["0", "-1", "fast", "nan", "1,", "inf"])
def test_what_is_no_rate_is_refused(calibration: Path, rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bullet("simulate", "--calibration", calibration, "--workload", "azure-code", "--rate", rate)
    assert "rate" in capsys.readouterr().err


def test_a_calibration_without_a_model_or_samples_is_named(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--workload", "azure-code", "--rate", "5", "--policy", "time_sliced"]
    samples_path(calibration).unlink()
    assert bullet("simulate", "--calibration", calibration, *words, "--truth", "table") == 1
    assert "samples behind the calibration" in capsys.readouterr().err
    sheet = datasheet("NVIDIA H200", 132)
    assert sheet is not None
    sheet.save(tmp_path / "sheet.json")
    assert bullet("simulate", "--calibration", tmp_path / "sheet.json", *words) == 1
    assert "does not say of which model" in capsys.readouterr().err


def test_a_workload_of_which_nothing_fits_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "huge.jsonl"
    path.write_text('{"arrival": 0, "prompt_tokens": 5000000, "output_tokens": 1}\n')
    words = ["simulate", "--calibration", "nvidia-h200", "--workload", str(path), "--rate", "5"]
    assert cli.main([*words, "--policy", "time_sliced"]) != 0
    assert "no request of it fits" in capsys.readouterr().err


def test_targets_that_nothing_can_meet_are_said_at_once(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> None:
        raise AssertionError("it takes minutes")

    monkeypatch.setattr("bulletserve.simulation.scored_answers", run)
    words = ["simulate", "--calibration", calibration, "--workload", "long-context", "--goodput", *ARMS]
    assert bullet(*words, "--tpot-slo-ms", "0.01", "--json", tmp_path / "out.json") == 0
    shown = capsys.readouterr().out
    assert shown.count("has no goodput: even alone on the device at most 0% of") == 2
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["metrics"]["goodput_long_context_static_split_decode_fraction_0_25_req_s"] == 0
    assert len(found["without_goodput"]) == 2
