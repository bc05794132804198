"""Which forecasts an engine plans with: measured, shipped, a datasheet's, or those of a few seconds on this CPU."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bulletserve import calibration_run, calibrations, forecasting
from bulletserve.calibrations import cache_folder, default_path, samples_path
from bulletserve.comparison.arm_run import TimedPrompt, run_arm
from bulletserve.compose import Engine, build_engine
from bulletserve.core.config import EngineConfig
from bulletserve.core.events import Output, Status
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.shapes import ModelShape
from bulletserve.core.snapshot import Limits
from bulletserve.estimator.calibration import Calibration, Provenance, datasheet, load
from bulletserve.forecasting import forecasts_for
from bulletserve.machine import cpu_name
from bulletserve.profiling.points import Point
from bulletserve.scheduler.policies import make_policy
from tests.end_to_end.test_processes import CONFIG
from tests.profiling.steady_cpu import measures_steadily

LLAMA = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072)
LATTICE = Lattice.of_splits(132, (Partition(100, 32),))


class Nowhere:
    def emit(self, output: Output) -> None: ...

    def report(self, status: Status) -> None: ...


class Foresighted:
    """A policy that cannot do without forecasts."""

    needs_forecasts = True

    def __getattr__(self, name: str) -> Any:
        return getattr(make_policy("static_split"), name)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrations, "PACKAGED", tmp_path / "packaged")


def gpu_engine(model: str | None = "org/llama") -> Any:
    limits = Limits(32, 16, 1000, 64, 10_000, 2112, LATTICE, 512, 2304)
    return SimpleNamespace(
        config=EngineConfig(model=model),
        checkpoint=SimpleNamespace(shape=LLAMA),
        info=SimpleNamespace(dtype="bfloat16"),
        limits=limits,
    )


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasting, "choose_device", lambda wanted: "cuda")
    monkeypatch.setattr(forecasting, "device_name", lambda kind: "NVIDIA H200")


@pytest.mark.usefixtures("on_a_gpu")
def test_a_gpu_without_a_calibration_goes_by_its_datasheet_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = forecasts_for(gpu_engine(), needed=False)
    assert "published peaks of NVIDIA H200" in caplog.text and "bullet calibrate org/llama" in caplog.text
    assert found.estimator is not None and found.note == "", "said once"


@pytest.mark.usefixtures("on_a_gpu")
def test_a_calibration_is_taken_without_a_warning_and_the_engine_says_what_its_graphs_hold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sheet = datasheet("NVIDIA H200", 132)
    assert sheet is not None
    mine = replace(sheet, provenance=Provenance("measured", shape=LLAMA, dtype="bfloat16"))
    mine = replace(mine, parameters=replace(mine.parameters, graph_tokens=512, host_layer_s=5e-3))
    mine.save(default_path("NVIDIA H200", 132, LLAMA, "bfloat16"))
    found = forecasts_for(gpu_engine(), needed=True)
    assert not caplog.records and found.note.startswith("forecasts: measured on this machine for this model")
    assert found.estimator is not None
    steps = [StepShape.prefill([(tokens, 0)], 32, 1) for tokens in (2304, 2400)]
    captured, eager = (found.estimator.predict(step, Partition(132, 0)).seconds for step in steps)
    assert captured < 0.1 < eager == pytest.approx(32 * 5e-3), "2304 rows come from graphs, whatever was calibrated"


@pytest.fixture
def cpu_engine(tmp_path: Path) -> Iterator[Engine]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = build_engine(EngineConfig(model=str(tmp_path / "config.json"), load_format="dummy", device="cpu"))
    yield engine
    engine.close()


def test_a_cpu_is_not_measured_for_a_policy_without_forecasts(
    cpu_engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    loop = cpu_engine.loop(Nowhere())
    assert loop.state.estimator is None and not caplog.records and not cache_folder().exists()


@pytest.fixture
def steady(cpu_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an idle machine: what is measured at a first start makes a good fit."""
    measures_steadily(monkeypatch, cpu_engine.checkpoint.shape, cpu_engine.limits.lattice.total_sms)


def path_of(engine: Engine) -> Path:
    return default_path(cpu_name(), engine.limits.lattice.total_sms, engine.checkpoint.shape, engine.info.dtype)


@pytest.mark.usefixtures("steady")
def test_a_cpu_is_measured_once_for_a_policy_with_forecasts(
    cpu_engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy: Any = Foresighted()
    loop = cpu_engine.loop(Nowhere(), policy)
    made = load(path_of(cpu_engine))
    assert made.provenance.source == "measured"
    assert made.parameters.graph_tokens == cpu_engine.limits.captured_rows
    assert isinstance(loop.state.estimator, forecasting.Estimator)
    assert any("measured just now, once" in note for note in cpu_engine.info.notes) and not caplog.records

    def measured_again(*_: object, **__: object) -> None:
        raise AssertionError("there is one already")

    monkeypatch.setattr(forecasting, "measure", measured_again)
    assert cpu_engine.loop(Nowhere(), policy).state.estimator is loop.state.estimator
    cpu_engine.forecasts = None
    cpu_engine.loop(Nowhere(), policy)
    assert "measured on this machine for this model" in cpu_engine.info.notes[-1]


def slow_prompts(point: Point) -> float:
    """Times as on a machine where another program takes turns with ours, so that kinds of steps disagree."""
    return {"prefill": 1.0, "decode": 1.0}.get(point.kind, 5.0)


@pytest.mark.parametrize(
    ("noise", "runs", "doubt"),
    [
        (lambda point: 1.0, 4, "not all was measured: time ran out after 4 of 12 runs"),
        (slow_prompts, inf, "worse than a plain roofline, off by "),
    ],
    ids=["cut short", "noisy"],
)
def test_what_makes_no_good_calibration_serves_one_run_and_is_measured_again(
    noise: Callable[[Point], float],
    runs: float,
    doubt: str,
    cpu_engine: Engine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, total = cpu_engine.checkpoint.shape, cpu_engine.limits.lattice.total_sms
    done = measures_steadily(monkeypatch, shape, total, noise)
    clock = SimpleNamespace(monotonic=lambda: 1e6 if len(done) > runs else 0.0)  # one more run warms up
    monkeypatch.setattr(calibration_run, "time", clock)
    monkeypatch.setattr(forecasting, "time", clock)
    loop = cpu_engine.loop(Nowhere(), Foresighted())  # type: ignore[arg-type]
    assert loop.state.estimator is not None and loop.state.estimator.calibration.provenance.source == "measured"
    assert doubt in caplog.text and f"bullet calibrate {cpu_engine.config.model}" in caplog.text
    assert not cache_folder().exists(), "nothing is kept"
    clock.monotonic = lambda: 0.0
    measures_steadily(monkeypatch, shape, total)
    cpu_engine.forecasts = None
    caplog.clear()
    cpu_engine.loop(Nowhere(), Foresighted())  # type: ignore[arg-type]
    assert "measured just now, once" in cpu_engine.info.notes[-1] and not caplog.records
    assert load(path_of(cpu_engine)).provenance.note == ""


@pytest.mark.usefixtures("steady")
def test_samples_that_lie_there_are_fitted_again_where_their_calibration_cannot_be_read(
    cpu_engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an earlier version, say. They may have taken minutes: seven seconds of measuring must not replace them."""
    policy: Any = Foresighted()
    cpu_engine.loop(Nowhere(), policy)
    path = path_of(cpu_engine)
    before, samples = load(path), samples_path(path).read_bytes()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))

    def measured_again(*_: object, **__: object) -> None:
        raise AssertionError("there are samples")

    monkeypatch.setattr(forecasting, "measure", measured_again)
    cpu_engine.forecasts = None
    cpu_engine.loop(Nowhere(), policy)
    assert "fitted again" in cpu_engine.info.notes[-1] and "format 1" in caplog.text
    assert load(path).parameters == before.parameters and samples_path(path).read_bytes() == samples


def test_a_cpu_that_cannot_be_measured_in_passing_goes_by_another_models_calibration(
    cpu_engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet = datasheet("NVIDIA H200", 132)
    assert sheet is not None
    total, dtype = cpu_engine.limits.lattice.total_sms, cpu_engine.info.dtype
    other = Calibration(cpu_name(), total, sheet.parameters, Provenance("measured", shape=LLAMA, dtype=dtype))
    other.save(default_path(cpu_name(), total, LLAMA, dtype))
    monkeypatch.setattr(forecasting, "FIRST_START_S", -1.0)
    loop = cpu_engine.loop(Nowhere(), policy := Foresighted())  # type: ignore[arg-type]
    assert policy.needs_forecasts and loop.state.estimator is not None
    assert "could not be measured in passing" in caplog.text and "with another model" in cpu_engine.info.notes[-1]


@pytest.mark.usefixtures("steady")
def test_a_measurement_that_cannot_be_kept_is_used_all_the_same(
    cpu_engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    loop = cpu_engine.loop(Nowhere(), Foresighted())  # type: ignore[arg-type]
    assert loop.state.estimator is not None and loop.state.estimator.calibration.provenance.source == "measured"
    assert "cannot be kept" in caplog.text and "ordinary" not in caplog.text


def test_a_cpu_that_cannot_be_measured_at_all_goes_by_an_ordinary_one(
    cpu_engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasting, "FIRST_START_S", -1.0)
    loop = cpu_engine.loop(Nowhere(), Foresighted())  # type: ignore[arg-type]
    estimator = loop.state.estimator
    assert isinstance(estimator, forecasting.Estimator)
    assert "an ordinary CPU" in caplog.text and "bullet calibrate" in caplog.text
    prompt = StepShape(256, 256 * 257 // 2, 256, 0, 0, cpu_engine.checkpoint.shape.num_layers, 1)
    assert 0 < estimator.predict(prompt, Partition(cpu_engine.limits.lattice.total_sms, 0)).seconds < 60


def test_an_engine_that_was_measured_answers_as_before(cpu_engine: Engine) -> None:
    """Measuring takes seats and blocks and leaves random keys and values behind."""
    prompts = [TimedPrompt(0.0, tuple(range(i, i + 40 + i)), 12) for i in range(6)]
    before = [answer.tokens for answer in run_arm(cpu_engine, "time_sliced", prompts).answers]
    cpu_engine.loop(Nowhere(), Foresighted())  # type: ignore[arg-type]
    assert cpu_engine.forecasts is not None and cpu_engine.forecasts.estimator is not None
    assert [answer.tokens for answer in run_arm(cpu_engine, "time_sliced", prompts).answers] == before
