"""`bullet calibrate` from the command line to its files, on a tiny random model and on the packaged one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bulletserve import calibration_fit, calibration_run, cli
from bulletserve.cache_files import write_whole
from bulletserve.calibrations import default_path, find_calibration, samples_path
from bulletserve.commands import calibrate, outputs
from bulletserve.core.config import EngineConfig
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.samples import Sample
from bulletserve.core.shapes import ModelShape
from bulletserve.core.snapshot import Limits
from bulletserve.engine.load import choose_dtype
from bulletserve.estimator.calibration import Calibration, datasheet, load
from bulletserve.estimator.errors import GROUPS, exact
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.machine import cpu_name
from bulletserve.measurements import Measurements, load_measurements
from bulletserve.profiling.design import Counts, make_design
from bulletserve.profiling.points import Point
from bulletserve.profiling.scope import gpu_scope
from bulletserve.resources.cpu_threads import usable_cores
from tests.end_to_end.test_processes import CONFIG
from tests.profiling.steady_cpu import measures_steadily
from tests.simulator.devices import LLAMA_8B

LLAMA = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags that name a tiny random model; caches go to a folder of the test."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return [str(tmp_path / "config.json"), "--load-format", "dummy", "--device", "cpu"]


def h200(points: Callable[[Sample], Sample] = lambda sample: sample, cap_w: float = 560.0) -> Measurements:
    """What a run on a card as in the datasheet would measure, without noise."""
    lattice = Lattice.of_splits(132, (Partition(116, 16), Partition(100, 32), Partition(68, 64)))
    scope = gpu_scope(Limits(32, 16, 50_000, 280, 10_000, 2112, lattice, 512), 20_000, quick=True)
    made = make_design(lattice, scope.reach, scope.fit, scope.held_out)
    sheet = datasheet("NVIDIA H200", 132)
    assert sheet is not None
    facts = {"name": "NVIDIA H200", "total_sms": 132, "power_cap_w": cap_w, "top_clock_mhz": 1830.0, "driver": "580"}
    truth = replace(sheet.parameters, power_cap_w=cap_w)

    def samples(of: tuple[Point, ...]) -> tuple[Sample, ...]:
        found: list[Sample] = []
        for point in of:
            prefill, decode = point.prefill_step(32), point.decode_step(32)
            for step, beside in ((prefill, decode), (decode, prefill)):
                if step is not None:
                    one = Sample(step, point.partition, beside, 1.0)
                    seen = exact(truth, 132, LLAMA, one)
                    mhz = seen.clock_ratio * 1830.0
                    found.append(points(Sample(step, point.partition, beside, seen.seconds, seen.watts, mhz)))
        return tuple(found)

    return Measurements(facts, LLAMA, 2, samples(made.fit), samples(made.held_out))


def test_a_tiny_model_is_measured_fitted_and_written_where_serve_looks(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on an idle machine: else nothing might be written. Steps are really run in the test of the packaged model."""
    measures_steadily(monkeypatch, open_checkpoint(tiny[0], "dummy").shape, usable_cores())
    assert cli.main(["calibrate", *tiny, "--quick"]) == 0
    folder = tmp_path / "cache" / "bulletserve" / "calibrations"
    shape = open_checkpoint(tiny[0], "dummy").shape
    dtype = str(choose_dtype("auto")).removeprefix("torch.")
    path = default_path(cpu_name(), usable_cores(), shape, dtype)
    assert set(folder.iterdir()) == {path, samples_path(path)}
    calibration, measured = load(path), load_measurements(samples_path(path))
    origin = calibration.provenance
    assert (calibration.device, calibration.total_sms) == (cpu_name(), usable_cores())
    assert origin.samples == len(measured.fit) and origin.source == "measured" and origin.torch and origin.commit
    assert origin.shape == measured.shape == shape and measured.cut_short == ""
    assert calibration.parameters.graph_tokens > 8192, "no step on a CPU waits for a host that launches it"
    assert set(origin.holdout_errors) <= set(GROUPS) and origin.holdout_errors["decode alone"]["count"] == 2
    text = capsys.readouterr().out
    assert "calibrated" in text and "roofline" in text and "linear regression" in text
    found = find_calibration(cpu_name(), usable_cores(), shape, dtype)
    assert found.calibration == calibration and found.own
    assert found.source.startswith(f"measured on this machine for this model, {origin.samples} samples")
    assert found.source.endswith(f" ({path})")


def brief_plan(engine: Any, device_kind: str, *, seed: int) -> calibration_run.CalibrationPlan:
    """Of a first start, with two points to judge by."""
    plan = calibration_run.make_plan(engine, device_kind, brief=True, seed=seed)
    held_out = make_design(engine.limits.lattice, plan.scope.reach, Counts(1, 1, 0, 0), Counts(0, 0, 0, 0), 99).fit
    return replace(plan, design=replace(plan.design, held_out=held_out))


@pytest.mark.model
@pytest.mark.slow
def test_the_packaged_model_briefly_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the points of a first start and a few seconds more: --quick would take half a minute. How good the fit is
    depends on what else this machine does, so that is not judged here (tests/commands/test_doubtful_calibrations)."""
    monkeypatch.setattr(calibrate, "make_plan", lambda *engine, quick, seed: brief_plan(*engine, seed=seed))
    monkeypatch.setattr(calibrate, "is_beaten", lambda calibration: False)
    out, report = tmp_path / "smollm2.json", tmp_path / "figures"
    words = ["calibrate", "--device", "cpu", "--quick", "--out", str(out), "--report", str(report)]
    assert cli.main(words) == 0
    measured = load_measurements(samples_path(out))
    assert measured.shape.num_layers == 30
    assert len(measured.fit) > 6 and len(measured.held_out) > 1
    figures = {path.name for path in report.iterdir()}
    assert {"forecasts.png", "forecasts.svg", "scaling.png", "scaling.svg"} <= figures
    assert "power.png" not in figures and "no power line" in capsys.readouterr().out
    assert load(out).parameters.matmul_flops > 1e8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "x.json"], "--from a calibration is for --report FOLDER"),
        (["model", "--from", "x.json", "--report", "r"], "--from x.json measures nothing: leave MODEL out"),
        (["--from", "x.json", "--report", "r", "--out", "y.json"], "measures nothing: leave --out out"),
        (["model", "--quick", "--from", "x.samples.json"], "measures nothing: leave MODEL, --quick out"),
        (["--from", "x.samples.json", "--time-limit", "0"], "measures nothing: leave --time-limit out"),
        (["--from", "x.samples.json", "--dtype", "float32"], "measures nothing: leave --dtype out"),
        (["--from", "x.samples.json", "--max-num-seqs", "8", "--seed", "1"], "leave --max-num-seqs, --seed out"),
        (["--from", "x.samples.json", "--no-enable-prefix-caching"], "leave --no-enable-prefix-caching out"),
        (["--from", "absent.samples.json"], "--from absent.samples.json: there is no such file"),
        (["--from", "absent"], "--from absent: there is no such file"),
        (["--time-limit", "0"], "--time-limit must be a number of seconds above 0"),
        (["--from", "absent.json", "--report", "r"], "--from absent.json: there is no such file"),
        (["--out", "nowhere/x.json"], "there is no folder nowhere"),
        (["--out", "x.samples.json"], "is for samples: name the calibration otherwise"),
        (["--from", "a.samples.json", "--out", "a.samples.json"], "is for samples: name the calibration otherwise"),
        (["--out", "."], "that is a folder, name a file"),
        (["--report", "a_file"], "that is a file, name a folder"),
        (["no/such/model.gguf"], "no such file or folder"),
        (["--device", "cuda"], "--device cuda"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"a_file", "x.json", "x.samples.json", "a.samples.json"}
    for name in files:
        Path(name).touch()

    def measured(*_: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(calibrate, "measure", measured)
    assert cli.main(["calibrate", *words]) == 1
    said = capsys.readouterr()
    assert message in said.err and said.err.startswith("bullet: ") and said.err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize(("flags", "seats"), [([], 280), (["--max-num-seqs", "64"], 64)])
def test_on_a_gpu_the_engine_has_room_for_a_full_batch_and_prompts(
    flags: list[str], seats: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def built(config: EngineConfig) -> None:
        raise calibrate.ConfigError(f"asked for {config.max_num_seqs} seats")

    monkeypatch.setattr(calibrate, "choose_device", lambda wanted: "cuda")
    monkeypatch.setattr(calibrate, "build_engine", built)
    assert cli.main(["calibrate", *flags]) == 1
    assert f"asked for {seats} seats" in capsys.readouterr().err


def test_without_matplotlib_a_report_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outputs, "find_spec", lambda name: None)
    assert cli.main(["calibrate", "--report", "somewhere"]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured_and_ends_the_lanes(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[bool] = []
    build = calibrate.build_engine

    def built(config: Any) -> Any:
        engine = build(config)
        close = engine.close
        engine.close = lambda: (closed.append(True), close())  # type: ignore[method-assign]
        return engine

    runs: list[Point] = []
    measure = calibration_run.Profiler.measure

    def interrupted(self: Any, point: Point, pace: Any) -> Any:
        runs.append(point)
        if len(runs) == 5:
            raise KeyboardInterrupt
        return measure(self, point, pace)

    monkeypatch.setattr(calibrate, "build_engine", built)
    monkeypatch.setattr(calibration_run.Profiler, "measure", interrupted)
    assert cli.main(["calibrate", *tiny, "--quick", "--out", str(tmp_path / "x.json")]) == 130
    assert closed == [True] and len(runs) == 5
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "x.partial.samples.json"}
    kept = load_measurements(tmp_path / "x.partial.samples.json")
    assert 0 < len(kept.fit + kept.held_out) <= 8, "what was measured is not lost"
    assert kept.cut_short.startswith("stopped after 3 of "), "the first run warms up, the fifth was broken off"
    assert f"bullet calibrate --from {tmp_path / 'x.partial.samples.json'}\n" in capsys.readouterr().out


def test_a_calibration_of_a_part_says_so_and_comes_after_those_of_whole_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    whole = h200()
    part = replace(
        whole, cut_short="stopped after 3 of 9 runs", device={**whole.device, "date": "2026-11-29", "note": "by hand"}
    )
    path = default_path("NVIDIA H200", 132, LLAMA, "")
    calibration_fit.fit_measured(part).save(path.with_suffix(".partial.json"))
    found = find_calibration("NVIDIA H200", 132, LLAMA, "")
    assert found.calibration is not None
    assert found.calibration.provenance.note == "by hand; not all was measured: stopped after 3 of 9 runs"
    assert "not all was measured: stopped after 3 of 9 runs" in found.source
    calibration_fit.fit_measured(whole).save(path)
    found = find_calibration("NVIDIA H200", 132, LLAMA, "")
    assert f"({path})" in found.source and "not all" not in found.source


def test_points_without_a_figure_are_told_unless_they_are_many(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measures_steadily(monkeypatch, open_checkpoint(tiny[0], "dummy").shape, usable_cores())
    measure = calibration_run.Profiler.measure
    bad = {"mixed"}

    def picky(self: Any, point: Point, pace: Any) -> Any:
        if point.kind in bad:
            raise calibration_run.TooFewSteps("nothing came")
        return measure(self, point, pace)

    monkeypatch.setattr(calibration_run.Profiler, "measure", picky)
    out = str(tmp_path / "x.json")
    assert cli.main(["calibrate", *tiny, "--quick", "--out", out]) == 0
    assert "no figure for mixed" in capsys.readouterr().out
    assert len(load_measurements(tmp_path / "x.samples.json").skipped) == 4
    bad.add("decode")
    assert cli.main(["calibrate", *tiny, "--quick", "--out", out]) == 1
    said = capsys.readouterr()
    assert "11 points gave no figure, the first: " in said.err
    assert f"nothing is written; the samples are in {tmp_path / 'x.partial.samples.json'}" in said.out
    assert len(load_measurements(tmp_path / "x.partial.samples.json").skipped) == 11, "what there is is kept"
    assert len(load_measurements(tmp_path / "x.samples.json").skipped) == 4, "those of the calibration that stays"


def test_points_whose_runs_disagree_are_run_again(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour on the machine triples the times of decode in the first round."""
    counts: dict[Point, int] = {}

    def measured(self: Any, point: Point, pace: Any) -> Any:
        run = counts[point] = counts.get(point, 0) + 1
        steps = (point.prefill_step(2), point.decode_step(2))
        slow = 3.0 if run == 1 and point.kind == "decode" else 1.0
        return tuple(
            Sample(step, point.partition, beside, slow * (1e-3 + 1e-5 * step.rows))
            for step, beside in (steps, steps[::-1])
            if step is not None
        )

    monkeypatch.setattr(calibration_run.Profiler, "measure", measured)
    out = tmp_path / "x.json"
    assert cli.main(["calibrate", *tiny, "--out", str(out)]) == 0
    by_kind = {kind: {counts[point] for point in counts if point.kind == kind} for kind in ("prefill", "decode")}
    assert by_kind["decode"] <= {3, 4} and by_kind["prefill"] <= {2, 3}, "one more for the point that warms up"
    kept = load_measurements(samples_path(out))
    alone = [s for s in kept.fit + kept.held_out if s.step.kind == "decode" and s.alongside is None]
    assert alone and all(s.seconds == pytest.approx(1e-3 + 1e-5 * s.step.rows) for s in alone)


def test_a_fit_recovers_a_card_and_beats_what_knows_no_neighbour() -> None:
    calibration, errors = calibration_fit.fit_and_judge(h200())
    assert list(errors) == ["calibrated", "roofline", "linear regression"]
    assert calibration.provenance.holdout_errors == errors["calibrated"]
    for group in GROUPS:
        assert errors["calibrated"][group]["median"] < 0.04
    assert errors["calibrated"]["side by side"]["median"] < 0.5 * errors["roofline"]["side by side"]["median"]


def test_measurements_survive_their_file(tmp_path: Path) -> None:
    measured = h200()
    measured.save(tmp_path / "x.samples.json")
    assert load_measurements(tmp_path / "x.samples.json") == measured


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 9}', '{"format": 1, "fit": 3}'])
def test_a_file_without_samples_says_so(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.samples.json"
    path.write_text(text)
    with pytest.raises(calibrate.ConfigError, match=r"x\.samples\.json"):
        load_measurements(path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_whole(path, "old")

    def refuse(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Calibration]:
    """A calibration file of a made-up card with its samples beside it."""
    path = tmp_path_factory.mktemp("card") / "card.json"
    measured = h200()
    calibration, _ = calibration_fit.fit_and_judge(measured)
    calibration.save(path)
    measured.save(samples_path(path))
    return path, calibration


def test_figures_are_drawn_from_a_file(card: tuple[Path, Calibration], tmp_path: Path) -> None:
    path, _ = card
    folder = tmp_path / "new" / "figures"
    assert cli.main(["calibrate", "--report", str(folder), "--from", str(path)]) == 0
    for name in ("forecasts", "scaling", "corun", "power"):
        with Image.open(folder / f"{name}.png") as picture:
            assert min(picture.size) > 500
            colours = picture.convert("RGB").getcolors(1 << 24)
            assert colours is not None and len(colours) > 50, "there is something on it"
        svg = (folder / f"{name}.svg").read_text()
        assert "NVIDIA H200, 132 SMs" in svg and "8.0 billion" in svg
    assert "cap 560 W" in (folder / "power.svg").read_text()
    assert "measured, ms" in (folder / "forecasts.svg").read_text()
    assert "64 rows of 1025 tokens" in (folder / "scaling.svg").read_text()


def test_a_calibration_without_its_samples_cannot_be_drawn(
    card: tuple[Path, Calibration], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lonely = tmp_path / "lonely.json"
    card[1].save(lonely)
    assert cli.main(["calibrate", "--report", str(tmp_path / "r"), "--from", str(lonely)]) == 1
    assert "lonely.samples.json" in capsys.readouterr().err


def test_a_step_beside_nothing_draws_no_surface(tmp_path: Path) -> None:
    from bulletserve.calibration_figures import corun_figure, power_figure

    measured = h200(cap_w=1e6)
    alone = replace(
        measured,
        fit=tuple(s for s in measured.fit if s.alongside is None),
        held_out=(),
        device=measured.device | {"power_cap_w": None},
    )
    calibration, _ = calibration_fit.fit_and_judge(alone)
    assert corun_figure(calibration, alone) is None and power_figure(calibration, alone) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"seconds": 0.05', '"seconds": NaN', "NaN is no number of JSON"),
        ('"seconds": 0.05', '"seconds": -1', "nothing measured is -1.0"),
        ('"seconds": 0.05', '"seconds": 1e999', "nothing measured is inf"),
        ('"seconds": 0.05', '"seconds": 1e300', "nothing measured is 1e+300"),
        ('"seconds": 0.05', '"seconds": 1e-300', "nothing measured is 1e-300"),
        ('"dtype_bytes": 2', '"dtype_bytes": 0', "dtype_bytes is 0: it must be one of"),
        ('"dtype_bytes": 2', '"dtype_bytes": -2', "dtype_bytes is -2"),
        ('"dtype_bytes": 2', '"dtype_bytes": 2.0', "dtype_bytes is 2.0"),
        ('"total_sms": 132', '"total_sms": 132.5', "total_sms 132.5 and graph_tokens 512 must be whole"),
        ('"total_sms": 132', '"graph_tokens": 1e300, "total_sms": 132', "graph_tokens 1e+300 must be whole"),
        ('"format": 1', '"format": 1, "more": ' + "[" * 100_000, "nested too deeply"),
        ('"num_layers": 32', '"num_layers": 0', "sizes of a model"),
        ('"total_sms": 132', '"total_sms": 0', "total_sms is 0"),
        ('"total_sms": 132', '"total": 132', "do not say of which device"),
        ('"top_clock_mhz": 1830.0', '"top_clock_mhz": 1e999', "top_clock_mhz is inf"),
        ('"device": {', '"device": 7, "was": {', "holds no samples"),
    ],
)
def test_samples_with_impossible_numbers_are_one_line(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill = Sample(StepShape.prefill([(2048, 0)], 32, 1), Partition(132, 0), None, 0.05)
    decode = Sample(StepShape.decode(32, 65536, 32), Partition(0, 132), None, 0.007)
    facts = {"name": "a card", "total_sms": 132, "power_cap_w": None, "top_clock_mhz": 1830.0}
    path = tmp_path / "a.samples.json"
    Measurements(facts, LLAMA_8B, 2, (prefill, decode), ()).save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert cli.main(["calibrate", "--from", str(path)]) == 1
    said = capsys.readouterr().err
    assert message in said and said.startswith("bullet: ") and said.count("\n") == 1


def test_a_calibration_that_loses_to_the_baselines_says_so() -> None:
    def errors(median: float) -> dict[str, dict[str, float]]:
        return {"decode alone": {"median": median, "p90": 2 * median, "count": 4.0}}

    bad = {"calibrated": errors(0.4), "roofline": errors(0.2), "linear regression": errors(0.5)}
    assert calibrate.doubts(bad)[0].startswith("decode alone: worse than a plain roofline")
    assert not calibrate.doubts(bad | {"calibrated": errors(0.19)})
    small = {"calibrated": errors(0.04), "roofline": errors(0.03), "linear regression": errors(0.03)}
    assert not calibrate.doubts(small), "hardly a difference"
