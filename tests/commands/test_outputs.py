"""What a command is going to write is tried out before its work, in every command that writes."""

import io
import json
import os
from pathlib import Path

import pytest

from bulletserve import cli
from bulletserve.commands import calibrate, compare, watched_engine
from bulletserve.commands.outputs import check_outputs
from bulletserve.compose import build_engine
from bulletserve.core.errors import ConfigError
from bulletserve.telemetry import recorder
from bulletserve.telemetry.recorder import Recorder
from tests.end_to_end.test_processes import CONFIG

SIMULATE = ["simulate", "--calibration", "nvidia-h200", "--workload", "azure-code", "--policy", "time_sliced"]
COMMANDS = {
    "simulate": [*SIMULATE, "--rate", "5"],
    "compare": ["compare"],
    "bench": ["bench", "--url", "http://127.0.0.1:9", "--rate", "1"],
    "calibrate": ["calibrate"],
    "serve": ["serve"],
}
FILES = [
    ("simulate", "--json"),
    ("simulate", "--record"),
    ("compare", "--json"),
    ("bench", "--json"),
    ("bench", "--jsonl"),
    ("calibrate", "--out"),
    ("serve", "--record"),
]
FOLDERS = [("simulate", "--report"), ("bench", "--report"), ("calibrate", "--report")]


def bullet(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a model has begun to work."""

    def load(*_: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(compare, "build_engine", load)
    monkeypatch.setattr(calibrate, "build_engine", load)
    monkeypatch.setattr(watched_engine.WatchedEngine, "start", load)


@pytest.mark.parametrize(("command", "flag"), FILES)
@pytest.mark.parametrize("where", [".", "none/file", "/proc/file", "/dev/null", "x" * 250])
def test_a_file_that_cannot_be(
    command: str, flag: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bullet(*COMMANDS[command], flag, tmp_path / where) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"bullet: {flag} ") and len(said.splitlines()) == 1


@pytest.mark.parametrize(("command", "flag"), FOLDERS)
def test_a_folder_that_cannot_be(command: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for path in ("/proc/x", tmp_path / "file", tmp_path / "file/x"):
        assert bullet(*COMMANDS[command], flag, path) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"bullet: {flag} ") and len(said.splitlines()) == 1


def test_the_default_place_of_a_calibration_is_tried_out_too(tmp_path: Path) -> None:
    check_outputs({"--out": tmp_path / "new/folder/file"}, make=True)
    assert list((tmp_path / "new/folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Not a directory|File exists"):
        check_outputs({"--out": tmp_path / "file/folder/x"}, make=True)


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize("name", ["x.samples.json", "x.partial.samples.json", "too long"])
def test_the_samples_beside_a_calibration_are_tried_out_too(
    name: str,
    default: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whether FILE is given or found, and where it alone could be written."""
    out = tmp_path / ("x" * 235 if name == "too long" else "x.json")
    if name != "too long":
        (tmp_path / name).mkdir()
    words = ["calibrate"]
    if default:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        words += [str(tmp_path / "config.json"), "--load-format", "dummy", "--device", "cpu"]
        monkeypatch.setattr(calibrate, "build_engine", build_engine)
        monkeypatch.setattr(calibrate, "default_path", lambda *_: out)
        monkeypatch.setattr(calibrate, "measure", pytest.fail)
    assert bullet(*words, *(() if default else ("--out", out))) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"bullet: {'without --out, the file' if default else '--out'}, ") and said.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if path.is_file() and path.name != "config.json"]


def test_where_samples_are_fitted_again_is_tried_out_before_the_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "load_measurements", lambda path: None)
    monkeypatch.setattr(calibrate, "_conclude", lambda *_: pytest.fail("the work has begun"))
    (tmp_path / "x.samples.json").write_text("{}")
    (tmp_path / "x.json").mkdir()
    assert bullet("calibrate", "--from", tmp_path / "x.samples.json") == 1
    assert "x.json: that is a folder" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "flags"), [("simulate", ("--json", "--record")), ("bench", ("--json", "--jsonl"))])
def test_two_outputs_are_two_files(
    command: str, flags: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = flags
    (tmp_path / "folder").mkdir()
    assert bullet(*COMMANDS[command], one, tmp_path / "x", other, tmp_path / "folder/../x") == 1
    assert "name the same file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "serve"])
def test_no_record_is_written_over_another(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    path.write_text("precious")
    assert bullet(*COMMANDS[command], "--record", path) == 1
    assert "is there already: name a new file" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="would overwrite"):
        Recorder(path, {})
    assert path.read_text() == "precious"
    empty = tmp_path / "empty"
    empty.touch()
    Recorder(empty, {}).close()
    assert empty.stat().st_size


def test_the_record_of_an_engine_that_is_started_again_has_a_name_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert watched_engine.next_record(path) == tmp_path / "run.2"
    (tmp_path / "run.2").write_text("of another day")
    (tmp_path / "run.3").symlink_to("nowhere")
    assert watched_engine.next_record(path) == tmp_path / "run.4"


class FullFile(io.RawIOBase):
    """Takes a header and then nothing more."""

    def write(self, data: object) -> int:
        raise OSError(28, os.strerror(28))


def test_a_record_that_breaks_off_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_all = Recorder._write_all

    def on_a_full_disk(self: Recorder) -> None:
        self._file.close()
        self._file = FullFile()  # type: ignore[assignment]
        write_all(self)

    monkeypatch.setattr(recorder.Recorder, "_write_all", on_a_full_disk)
    words = [*SIMULATE, "--requests", 3, "--rate", 5, "--json", tmp_path / "out.json"]
    assert bullet(*words, "--record", tmp_path / "run") == 1
    captured = capsys.readouterr()
    assert f"--record {tmp_path / 'run'} broke off: No space left on device" in captured.err
    assert "time_sliced" in captured.out and (tmp_path / "out.json").exists(), "the figures are told all the same"


def test_what_the_system_refuses_later_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr("bulletserve.commands.simulate.write_result", full)
    assert bullet(*SIMULATE, "--requests", 3, "--rate", 5, "--json", tmp_path / "out.json") == 1
    assert capsys.readouterr().err == f"bullet: {tmp_path / 'out.json'}: No space left on device\n"
