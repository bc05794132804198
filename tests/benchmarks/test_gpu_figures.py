import json
from math import isnan, nan

import pytest
from benchmarks.gpu.ratios import Alone, best_within, prefill_ratio, shared, x_ratio
from benchmarks.gpu.report import Report
from benchmarks.gpu.waves import wave_loss

from bulletserve.core.launch import Launch
from bulletserve.core.plan import DecodeStep
from bulletserve.kernels.cuda.matmul_choice import CUBLAS, Choice
from bulletserve.profiling.traces import StepTime, TooFewSteps, common_window, figures

ALONE = Alone(10.0, 40_000.0)
MIXED = [
    shared("256", ALONE, 14.0, 16_000.0),
    shared("512", ALONE, 20.0, 26_000.0),
    shared("1024", ALONE, 30.0, 30_000.0),
]


def test_x_of_time_slicing_is_one():
    assert shared("half and half", ALONE, 20.0, 20_000.0).x == pytest.approx(1.0)


def test_the_best_mixed_batch_is_one_that_is_as_quick():
    found = best_within(MIXED, 20.0, lambda one: one.prefill_tok_s)
    assert found is not None and found.label == "512"
    assert best_within(MIXED, 13.9, lambda one: one.x) is None


def test_ratios_to_the_best_mixed_batch():
    co_run = shared("d32 p100", ALONE, 20.0, 28_000.0)
    assert x_ratio(co_run, MIXED) == pytest.approx(1.2 / 1.15)
    assert prefill_ratio(co_run, MIXED) == pytest.approx(28 / 26)
    quick = shared("d64 p68", ALONE, 12.0, 14_000.0)
    assert x_ratio(quick, MIXED) == pytest.approx(quick.x), "nothing is as quick but decode alone"
    assert isnan(prefill_ratio(quick, MIXED))


def steps(*times: tuple[float, float]) -> list[StepTime]:
    ends = [0.0, *(end for _, end in times)]
    launch = Launch(0, DecodeStep(32), rows=(0,))
    return [StepTime(launch, start, end, start - before) for (start, end), before in zip(times, ends, strict=False)]


def test_only_the_time_in_which_both_lanes_are_busy_counts():
    one = steps((0, 10), (10, 20), (20, 30), (31, 40), (40, 50))
    two = steps((12, 32), (32, 45))
    window = common_window([one, two])
    assert window == (12, 45)
    found = figures(one, window)
    assert found.steps == 2 and found.period_ms == 11 and found.gaps_ms == (1,)
    assert found.step_ms == (10, 9)


def test_too_few_steps_are_no_figure():
    with pytest.raises(TooFewSteps, match="1 of 1 steps"):
        figures(steps((0, 10)), (0, 10))


def test_wave_loss_counts_idle_turns():
    tile = Choice("triton", 128, 256, 64, 8, 3)
    assert wave_loss(tile, 128 * 10, 256 * 10, 4096, 100) == 0
    assert wave_loss(tile, 128 * 11, 256 * 10, 4096, 100) == pytest.approx(0.45)
    assert wave_loss(tile, 128, 256 * 50, 4096, 100) == pytest.approx(0.5)
    shared_tail = Choice("triton", 128, 256, 64, 8, 3, stream="tail")
    assert wave_loss(shared_tail, 128 * 11, 256 * 10, 4096, 100) < 0.02
    assert isnan(wave_loss(CUBLAS, 128, 4096, 4096, 100))


def test_a_report_is_on_disk_after_every_figure(tmp_path, capsys):
    report = Report("gpu_x", tmp_path)
    report.add(a_ms=1.5, nothing_ms=nan)
    report.add(b_x=2.0)
    document = json.loads((tmp_path / "gpu_x.json").read_text())
    assert document["metrics"] == {"a_ms": 1.5, "b_x": 2.0}
    assert {"command", "hardware", "versions", "commit", "date"} <= set(document)
    report.line("name", 1.5, nan, 12345.6)
    assert capsys.readouterr().out.split() == ["name", "1.500", "-", "12345.6"]
