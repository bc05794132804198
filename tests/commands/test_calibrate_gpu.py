"""`bullet calibrate` as it runs on a GPU, all but the kernels: a card of arithmetic, its counters, its failures."""

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from bulletserve import calibration_run, cli
from bulletserve.calibration_run import in_turns
from bulletserve.calibrations import default_path, samples_path
from bulletserve.commands import calibrate
from bulletserve.core.config import EngineConfig
from bulletserve.core.events import Event
from bulletserve.core.launch import Launch
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import PrefillGroup
from bulletserve.core.snapshot import Limits
from bulletserve.estimator.calibration import datasheet, load
from bulletserve.estimator.estimator import Estimator
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.measurements import load_measurements
from bulletserve.profiling.design import Counts, Reach, make_design
from bulletserve.profiling.meter import LOOK_S, Meter, Watch
from tests.profiling.fake_device import FakeDevice

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
LATTICE = Lattice.of_splits(132, tuple(Partition(132 - n, n) for n in (16, 24, 32, 40, 48, 56, 64, 80)))


class Card(FakeDevice):
    """Steps alone take what the datasheet's forecast says."""

    lattice = LATTICE

    def __init__(self, model: str, fail_at: int) -> None:
        super().__init__(fail_at)
        self.shape = open_checkpoint(model, "dummy").shape
        sheet = datasheet("NVIDIA H200", 132)
        assert sheet is not None
        self._truth = Estimator(sheet, self.shape)
        self._contexts: dict[int, int] = {}
        self.look: Callable[[], None] | None = None
        self._next_look_ms = 0.0
        self.closed = False

    def wait(self, deadline_s: float) -> Sequence[Event]:
        until_ms = min(deadline_s * 1e3, self._ends[0][0] if self._ends else float("inf"))
        while self._next_look_ms <= until_ms < float("inf"):
            self.now_ms = max(self.now_ms, self._next_look_ms)
            self._next_look_ms += LOOK_S * 1e3
            if self.look is not None:
                self.look()
        return super().wait(deadline_s)

    def took_ms(self, launch: Launch) -> float:
        for seat in launch.seats:
            self._contexts[seat.seat] = seat.cached_tokens
        context = sum(self._contexts[row] + 1 for row in launch.rows)
        for row in launch.rows:
            self._contexts[row] += 1
        step, parts = launch.step, launch.parts
        first, end = step.layer_range if isinstance(step, PrefillGroup) else (0, self.shape.num_layers)
        prompts = [(part.end - part.start, part.start) for part in parts]
        rows = len(launch.rows)
        sampled = (rows + len(parts)) if end == self.shape.num_layers else 0
        shape = StepShape.mixed(prompts, rows, context, end - first, sampled)
        share = Partition(step.sms, 0) if parts else Partition(0, step.sms)
        return self._truth.predict(shape, share).seconds * 1e3

    def close(self) -> None:
        self.closed = True


class Nvml(SimpleNamespace):
    """Draws 500 W of the device's time, as a counter that moves every 50 ms says."""

    NVML_CLOCK_SM = 1

    def __init__(self, now_s: Callable[[], float]) -> None:
        super().__init__()
        self._now_s = now_s

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers = {
            "nvmlDeviceGetTotalEnergyConsumption": lambda: int(25_000 * int(self._now_s() / 0.05)),
            "nvmlDeviceGetClockInfo": lambda: 1700,
            "nvmlDeviceGetEnforcedPowerLimit": lambda: 700_000,
            "nvmlDeviceGetMaxClockInfo": lambda: 1980,
        }
        return lambda *_: answers[name]() if name in answers else None


class MadeUpWatch(Watch):
    """Looks at a meter by the clock of a card."""

    def __init__(self, device: Card, meter: Meter | None) -> None:
        super().__init__(meter)
        self._device = device

    def __enter__(self) -> Self:
        if self._meter is not None:
            self._meter.begin()
            self._device.look = self._meter.sample
        return self

    def __exit__(self, *_: object) -> None:
        self._device.look = None
        if self._meter is not None:
            self.watts, self.mhz = self._meter.end()


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Card]:
    """Puts a card into the machine; the cache is a folder of the test."""

    def put(model: str, fail_at: int = -1) -> Card:
        device = Card(model, fail_at)

        def built(config: EngineConfig) -> Any:
            checkpoint = open_checkpoint(config.model, config.load_format)
            layers, seats = checkpoint.shape.num_layers, config.max_num_seqs or 0
            limits = Limits(layers, 16, 45_000, seats, 10_000, 2112, LATTICE, 512, 2304)
            info = SimpleNamespace(
                vocab_size=1000, max_model_len=40_960, dtype="bfloat16", notes=(), describe=lambda: "a card"
            )
            return SimpleNamespace(
                config=config, checkpoint=checkpoint, limits=limits, info=info, executor=device, inbox=device,
                close=device.close,
            )  # fmt: skip

        monkeypatch.setitem(sys.modules, "pynvml", Nvml(device.now_s))
        monkeypatch.setattr("time.monotonic", device.now_s)  # time limits are the device's, too
        return_uuid = partial(SimpleNamespace, uuid="12-34")
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: return_uuid())
        monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
        monkeypatch.setattr(calibration_run, "driver_version", lambda: "580.1")
        monkeypatch.setattr("bulletserve.profiling.driver.Watch", partial(MadeUpWatch, device))
        monkeypatch.setattr(calibration_run, "Driver", partial(calibration_run.Driver, now_s=device.now_s))
        monkeypatch.setattr(calibrate, "choose_device", lambda wanted: "cuda")
        monkeypatch.setattr(calibrate, "build_engine", built)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return device

    return put


def words(model: str, *more: str) -> list[str]:
    return ["calibrate", str(SHAPES / model), "--load-format", "dummy", *more]


def paths(model: str) -> tuple[Path, Path]:
    path = default_path("NVIDIA H200", 132, open_checkpoint(str(SHAPES / model), "dummy").shape, "bfloat16")
    return path, samples_path(path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-4b"])
def test_a_card_is_measured_and_fitted_within_two_minutes(
    model: str, card: Callable[..., Card], capsys: pytest.CaptureFixture[str]
) -> None:
    device = card(str(SHAPES / model))
    assert cli.main(words(model)) == 0
    assert device.closed and device.now_s() < 120.0, "of the device's time, without loading and the fit"
    calibration, measured = load(paths(model)[0]), load_measurements(paths(model)[1])
    assert measured.cut_short == "" and measured.skipped == ()
    assert (len(measured.fit), len(measured.held_out), len(measured.power)) == (80, 38, 7)
    watts = [sample.watts for sample in measured.fitted]
    assert (min(watts), max(watts)) == pytest.approx((500.0, 500.0), rel=0.03), (
        "every window is long enough for the counter"
    )
    origin = calibration.provenance
    assert (origin.dtype, origin.driver, origin.samples) == ("bfloat16", "580.1", 87)
    assert calibration.parameters.graph_tokens == 2304
    for group in ("prefill alone", "decode alone", "mixed"):
        assert origin.holdout_errors[group]["median"] < 0.05
    assert "linear regression" in capsys.readouterr().out


def test_when_time_runs_out_what_there_is_is_written_and_fitted(
    card: Callable[..., Card], capsys: pytest.CaptureFixture[str]
) -> None:
    device = card(str(SHAPES / "qwen3-4b"))
    assert cli.main(words("qwen3-4b", "--time-limit", "60")) == 0
    assert device.now_s() < 75.0
    path, points = paths("qwen3-4b")
    measured = load_measurements(points)
    assert "time ran out after" in measured.cut_short and measured.cut_short in capsys.readouterr().out
    assert len(measured.power) == 7 and 10 < len(measured.fit) < 80
    assert load(path).provenance.samples == len(measured.fitted)


def test_a_step_that_fails_costs_no_point_that_was_measured(
    card: Callable[..., Card], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device, out = card(str(SHAPES / "qwen3-4b"), fail_at=1500), tmp_path / "x.json"
    assert cli.main(words("qwen3-4b", "--out", str(out))) in (0, 1), "whether it is enough for a fit or not"
    assert device.closed
    measured = load_measurements(samples_path(out))
    assert "broken" in measured.cut_short and measured.fitted
    assert "broken" in capsys.readouterr().out


def test_points_are_fitted_again_without_a_device(
    card: Callable[..., Card], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit fails where they were measured; elsewhere they are fitted all the same, to the same constants."""
    card(str(SHAPES / "llama-3.1-8b"))
    out = tmp_path / "x.json"

    def refuse(*_: object) -> None:
        raise RuntimeError("no fit today")

    with monkeypatch.context() as broken, pytest.raises(RuntimeError):
        broken.setattr(calibrate, "fit_and_judge", refuse)
        cli.main(words("llama-3.1-8b", "--quick", "--out", str(out)))
    points = samples_path(out)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {points.name}
    again = tmp_path / "y.json"
    assert cli.main(["calibrate", "--from", str(points), "--out", str(again)]) == 0
    assert cli.main(["calibrate", "--from", str(points)]) == 0
    assert load(again) == load(out)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_cut_short_has_seen_all_kinds(seed: int) -> None:
    """Of every beginning each kind, fitted or held out, is in proportion, to a point or two."""
    reach = Reach(256, 128, 16384, 64, 4096, 2048, 700_000, 280, 8192, 400)
    design = make_design(LATTICE, reach, Counts(18, 20, 12, 15), Counts(8, 8, 6, 8), seed)
    held = set(design.held_out)
    order = in_turns(design, random.Random(seed))
    kinds = [(point in held, point.kind) for point in order]
    assert sorted(order, key=repr) == sorted((*design.fit, *design.held_out), key=repr)
    assert in_turns(design, random.Random(seed + 1)) != order
    for kind in set(kinds):
        count = kinds.count(kind)
        for at in range(len(kinds)):
            assert kinds[:at].count(kind) == pytest.approx(count * at / len(kinds), abs=2.0)
