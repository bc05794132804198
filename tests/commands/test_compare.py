"""`bullet compare` from its words to its exit status: on a model of a moment, and with runs that come out as told."""

import json
from pathlib import Path

import pytest

from bulletserve import cli
from bulletserve.commands import compare
from bulletserve.commands.compare_tables import MEDIANS
from bulletserve.comparison import arm_run, measuring
from bulletserve.comparison.folder_lock import held
from bulletserve.comparison.other_programs import OtherPrograms
from bulletserve.telemetry.recorder import Recorder
from tests.comparison.device import Device
from tests.end_to_end.test_processes import CONFIG


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Words of `compare` on a model of a moment, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("config.json").write_text(json.dumps(CONFIG))
    words = ["compare", "config.json", "--load-format", "dummy", "--device", "cpu", "--dtype", "float32"]
    return [*words, "--num-gpu-blocks-override", 400, "--policies", "chunked_prefill", "time_sliced"]


@pytest.fixture
def workload(tiny: list[object]) -> str:
    """A list that is long enough for goodput."""
    lines = [json.dumps({"arrival": at, "prompt_tokens": 5 + at % 7, "output_tokens": 2 + at % 3}) for at in range(240)]
    Path("list.jsonl").write_text("\n".join(lines))
    return "list.jsonl"


def bullet(*words: object) -> int:
    return cli.main([str(word) for word in words])


def test_plain_use_prints_one_table_with_ratios(tiny: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    assert bullet(*tiny, "--requests", 4, "--rate", 200, "--rounds", 2, "--json", "out.json") == 0
    said = capsys.readouterr().out
    assert said.count("┏") == 1 and "4 requests, median of 2 rounds" in said and "no targets" in said
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in said.splitlines() if line.startswith("│")}
    assert said.count(MEDIANS) == 1
    assert rows["tokens/s"][0].split()[-1] == "1.00x"
    assert [cell.strip() for cell in rows["same answers"]] == ["100%", "100%"]
    assert "energy" not in rows and "met" not in rows and rows["both lanes busy"][0].strip() == "0% of the time"
    document = json.loads(Path("out.json").read_text())
    assert document["name"] == "compare_made-up" and document["targets"] is None
    assert {"made_up_chunked_prefill_at_200_tok_s", "made_up_time_sliced_at_200_round2_ttft_p90_ms"} < set(
        document["metrics"]
    )


def test_a_busy_machine_is_told(
    tiny: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What others took comes from `taken`, a number for each run; the first of each arm warms up."""
    taken = iter([0.0, 0.03, 0.0, 0.34, 0.0, 0.1, 0.0, 0.02])

    class Others(OtherPrograms):
        def __exit__(self, *_: object) -> None:
            self.taken_x = next(taken)

    monkeypatch.setattr(arm_run, "OtherPrograms", Others)
    assert bullet(*tiny, "--requests", 4, "--rate", 200, "--json", "out.json") == 0
    said = capsys.readouterr().out
    assert "THE MACHINE WAS BUSY: other programs took part of the engine's cores in 1 of 2 runs" in said
    assert "(time_sliced at 200 req/s, round 1: 34%)" in said and "on an idle machine" in said
    assert "other programs" in said and "34% of the cores" in said
    metrics = json.loads(Path("out.json").read_text())["metrics"]
    assert metrics["made_up_time_sliced_at_200_others_x"] == 0.34
    assert bullet(*tiny, "--requests", 4, "--rate", 200) == 0
    assert "BUSY" not in capsys.readouterr().out


def test_in_pieces_and_from_records(
    tiny: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What one call has no time for the next one does, a third has nothing to do."""
    words = [*tiny, "--requests", 4, "--rates", "100,200", "--runs", "runs", "--record", "records", "--tier", "loose"]
    assert bullet(*words, "--time-limit", 0.5) == 1
    assert "more than the 0.5 s of --time-limit" in capsys.readouterr().err
    with monkeypatch.context() as slow:
        slow.setattr(measuring.Measuring, "_expected_s", lambda *_: 99.0)
        assert bullet(*words, "--time-limit", 100.001) == 3
    said = capsys.readouterr().out
    assert "INCOMPLETE" in said and "  time_sliced at 200 req/s" in said and not list(Path("runs").glob("*.json"))
    assert bullet(*words, "--time-limit", 300) == 0
    first = capsys.readouterr().out
    assert first.count("chunked_prefill at 100 req/s: ") == 1 and "INCOMPLETE" not in first
    assert bullet(*words, "--time-limit", 300) == 0
    second = capsys.readouterr().out
    assert "chunked_prefill at 100 req/s: " not in second
    assert second[second.index("4 requests at 100") :] == first[first.index("4 requests at 100") :]
    records = sorted(Path("records").glob("[!.]*"))
    assert len(records) == 4 and all(record.name.endswith(".jsonl.gz") for record in records)
    assert bullet("replay", records[0]) == 0
    assert "policy chunked_prefill" in capsys.readouterr().out
    records[0].unlink()
    assert bullet(*words) == 0 and records[0].exists(), "a run without its record is run again"


def test_a_record_that_cannot_be_written_is_told_after_the_table(
    tiny: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(plain: Path, record: Path) -> None:
        assert list(Path("runs").glob("*.json")), "the run is kept before its record is compressed"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measuring, "_compress", full)
    assert bullet(*tiny, "--requests", 4, "--rates", 200, "--runs", "runs", "--record", "records") == 1
    said = capsys.readouterr().out
    assert "tokens/s" in said and said.count(" is not kept: No space left on device") == 2


def test_a_record_that_broke_off_makes_the_status_1(
    tiny: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Recorder, "__call__", lambda recorder, *_: recorder._stop("the disk is full"))
    assert bullet(*tiny, "--requests", 4, "--rates", 200, "--record", "records") == 1
    said = capsys.readouterr().out
    assert "tokens/s" in said and said.count("broke off and was removed: the disk is full") == 2
    assert not list(Path("records").glob("*.jsonl*"))


def test_goodput_around_a_rate_and_its_ratio(
    tiny: list[object], workload: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Device(monkeypatch, chunked_prefill=10.0, time_sliced=8.0)
    words = [*tiny, "--workload", workload, "--tier", "middle", "--json", "out.json"]
    assert bullet(*words, "--around", "10,8.1") == 0
    said = capsys.readouterr().out
    assert "goodput, targets TTFT 300 ms, TPOT 12 ms; ratios to chunked_prefill" in said
    assert "requests 40 to 199 are scored, a run ends with the last of them" in said and len(device.ran) <= 6
    metrics = json.loads(Path("out.json").read_text())["metrics"]
    assert metrics["goodput_list_chunked_prefill_req_s"] == pytest.approx(10.0, rel=0.02)
    assert metrics["goodput_list_time_sliced_over_chunked_prefill_x"] == pytest.approx(0.8, rel=0.02)
    low, high = (metrics[f"goodput_list_time_sliced_over_chunked_prefill_{edge}_x"] for edge in ("low", "high"))
    assert low <= 0.8 <= high


def test_goodput_from_anywhere(
    tiny: list[object], workload: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Device(monkeypatch, chunked_prefill=10.0, time_sliced=3.0)
    assert bullet(*tiny, "--workload", workload, "--ttft-slo-ms", 300, "--goodput", "--json", "out.json") == 0
    metrics = json.loads(Path("out.json").read_text())["metrics"]
    assert metrics["goodput_list_chunked_prefill_req_s"] == pytest.approx(10.0, rel=0.02)
    assert metrics["goodput_list_time_sliced_req_s"] == pytest.approx(3.0, rel=0.02)
    assert "chunked_prefill" in capsys.readouterr().out


def test_a_policy_at_fault_is_told_after_the_others(
    tiny: list[object], workload: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Device(monkeypatch)
    device.failing = {"chunked_prefill"}
    assert bullet(*tiny, "--workload", workload, "--rates", "5", "--json", "out.json") == 1
    told = capsys.readouterr()
    assert told.err == "bullet: chunked_prefill failed\n" and "time_sliced" in told.out
    document = json.loads(Path("out.json").read_text())
    assert document["failed"] == {"chunked_prefill": "chunked_prefill failed"}
    assert "list_time_sliced_at_5_tok_s" in document["metrics"]


def test_all_policies_at_fault_are_told(
    tiny: list[object], workload: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Device(monkeypatch)
    device.failing = {"chunked_prefill", "time_sliced"}
    words = [*tiny, "static_split", "--workload", workload, "--tier", "middle", "--rates", "5,5.2"]
    assert bullet(*words) == 1
    told = capsys.readouterr()
    assert "chunked_prefill: chunked_prefill failed; time_sliced: time_sliced failed" in told.err
    assert "static_split" in told.out and "atios" not in told.out and "atios" not in told.err


@pytest.mark.parametrize("flag", ["--runs", "--record"])
def test_a_folder_is_written_to_by_one_process(
    flag: str, tiny: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*tiny, "--requests", 2, "--rate", 200, flag, "kept"]
    with held([Path("kept")]):
        assert bullet(*words) == 1
        assert "kept is in use by another process: wait" in capsys.readouterr().err
    assert bullet(*words) == 0


def test_a_request_that_does_not_fit_is_named(
    tiny: list[object], workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bullet(*tiny, "--workload", workload, "--max-model-len", 12) == 1
    assert capsys.readouterr().err.startswith("bullet: request 6 needs 10 + 4 tokens, the context holds 12: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policies", "bullet", "bullet"], "every policy may be named once"),
        (["--goodput"], "goodput needs targets"),
        (["--goodput", "--tier", "tight", "--prompts", "x"], "goodput needs targets and a --workload"),
        (["--around", "3", "--tier", "tight"], "defined over 600 requests"),
        (["--around", "3", "--rates", "4"], "leave --rates and --rounds out"),
        (["--goodput", "--rounds", 2], "leave --rates and --rounds out"),
        (["--around", "3,4,5", "--policies", "bullet", "time_sliced"], "one for each of the 2 arms"),
        (["--tier", "tight", "--tpot-slo-ms", 5], "--tier names targets"),
        (["--tpot-slo-ms", 0], "--tpot-slo-ms must be a number of milliseconds above 0"),
        (["--time-limit", 60], "needs --runs"),
        (["--time-limit", 0, "--runs", "runs"], "above 0"),
        (["--workload", "none"], "no workload 'none'"),
        (["--runs", "/dev/null"], "--runs /dev/null: that is a file, name a folder"),
        (["--record", "/proc/x"], "--record /proc/x: "),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(
    words: list[object], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(compare, "build_engine", load)
    assert bullet("compare", *words) == 1
    said = capsys.readouterr().err
    assert said.startswith("bullet: ") and message in said and len(said.splitlines()) == 1
