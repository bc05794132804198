"""Fits that a plain way to forecast beats: what is kept of them, and who is told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bulletserve import calibration_fit, cli
from bulletserve.calibrations import default_path, find_calibration, is_beaten, is_sound, partial_path, samples_path
from bulletserve.core.samples import Sample
from bulletserve.estimator.calibration import load
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.measurements import Measurements, load_measurements
from bulletserve.profiling.points import Point
from bulletserve.resources.cpu_threads import usable_cores
from tests.commands.test_calibrate import LLAMA, h200, tiny
from tests.profiling.steady_cpu import measures_steadily

__all__ = ["tiny"]
OF_A_GROUP = "worse than a plain roofline or regression for decode alone"


def disturbed(factor: Callable[[Sample], float]) -> Measurements:
    """Points of the fit, but none held out, lasted so many times as long, for other programs."""
    sound = h200()
    slow = tuple(replace(one, seconds=factor(one) * one.seconds) for one in sound.fit)
    return replace(sound, fit=slow, device={**sound.device, "date": "2026-12-24"})


def decode_disturbed() -> Measurements:
    return disturbed(lambda one: 4.0 if one.step.kind == "decode" else 1.0)


def test_a_fit_that_a_roofline_beats_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples, out, report = tmp_path / "noisy.samples.json", tmp_path / "x.json", tmp_path / "figures"
    decode_disturbed().save(samples)
    words = ["calibrate", "--from", str(samples), "--out", str(out), "--report", str(report)]
    assert cli.main(words) == 1
    said = capsys.readouterr()
    assert said.err.startswith("bullet: nothing is written: worse than a plain roofline on the points held out, all ")
    assert "Measure again on an idle machine, not with --quick" in said.err and str(samples) in said.err
    assert "Error on points that were not fitted" in said.out, "how bad it is"
    assert not out.exists() and any(report.iterdir()), "which shows why"


def other_programs(point: Point) -> float:
    """Kinds of steps disagree: another program took turns with ours."""
    return {"prefill": 1.0, "decode": 1.0}.get(point.kind, 5.0)


def test_what_is_worth_less_replaces_neither_a_calibration_nor_its_samples(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, shape = tmp_path / "x.json", open_checkpoint(tiny[0], "dummy").shape
    words = ["calibrate", *tiny, "--quick", "--out", str(out)]
    measures_steadily(monkeypatch, shape, usable_cores())
    assert cli.main(words) == 0
    before = out.read_bytes(), samples_path(out).read_bytes()
    calibration, measured = load(out), load_measurements(samples_path(out))
    assert is_sound(calibration) and not partial_path(out).exists()
    capsys.readouterr()
    measures_steadily(monkeypatch, shape, usable_cores(), other_programs)
    assert cli.main(words) == 1
    said = capsys.readouterr()
    assert "nothing is written: " in said.err and f"the samples are in {partial_path(out)}" in said.err
    assert (out.read_bytes(), samples_path(out).read_bytes()) == before, "what was there is as it was"
    assert len(load_measurements(partial_path(out)).fit) == len(measured.fit), "they took time: they are not lost"
    measures_steadily(monkeypatch, shape, usable_cores())
    assert cli.main(words) == 0
    assert not partial_path(out).exists()


def test_a_fit_with_one_poor_group_is_kept_and_doubted_by_all_who_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sound, path = h200(), default_path("NVIDIA H200", 132, LLAMA, "")
    poor = disturbed(lambda one: 2.0 if one.step.kind == "decode" and one.alongside is None else 1.0)
    assert sum(one.step.kind == "decode" and one.alongside is None for one in poor.held_out) >= calibration_fit.ENOUGH
    samples, noisy = tmp_path / "noisy.samples.json", path.with_name("noisy.json")
    poor.save(samples)
    path.parent.mkdir(parents=True)
    assert cli.main(["calibrate", "--from", str(samples), "--out", str(noisy)]) == 0
    told = capsys.readouterr().out
    assert "decode alone: worse than a plain roofline or regression" in told and "on an idle machine" in told
    assert "every start that goes by it warns" in told
    assert not is_beaten(load(noisy)) and not is_sound(load(noisy))
    found = find_calibration("NVIDIA H200", 132, LLAMA, "", "org/llama")
    assert found.calibration == load(noisy) and OF_A_GROUP in found.source
    assert "to measure again, on an idle machine: bullet calibrate org/llama" in found.source
    calibration_fit.fit_and_judge(sound)[0].save(path)
    found = find_calibration("NVIDIA H200", 132, LLAMA, "")
    assert f"({path})" in found.source and "worse" not in found.source, "an older one, but a sound one"
