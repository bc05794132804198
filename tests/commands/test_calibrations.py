"""Which calibration fits: the user's own before the package's, this model's before another's, then the datasheet."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from bulletserve import calibrations
from bulletserve.calibrations import (
    SAMPLES_SUFFIX,
    Found,
    cache_folder,
    calibration_path,
    default_path,
    find_calibration,
    partial_path,
    samples_path,
    shape_hash,
)
from bulletserve.core.errors import ConfigError
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.calibration import Calibration, Provenance, datasheet, load
from bulletserve.estimator.errors import GROUPS
from bulletserve.profiling.design import MOST_SAMPLES
from bulletserve.simulation import open_calibration

LLAMA = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072)
SMALL = replace(LLAMA, num_layers=4)
MIDDLE = replace(LLAMA, num_layers=20)
H200 = "NVIDIA H200"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrations, "PACKAGED", tmp_path / "packaged")


def measured(
    shape: ModelShape, *, sms: int = 132, device: str = H200, date: str = "2026-11-29", dtype: str = "bfloat16"
) -> Calibration:
    sheet = datasheet(H200, 132)
    assert sheet is not None
    origin = Provenance("measured", date=date, shape=shape, dtype=dtype)
    return replace(sheet, device=device, total_sms=sms, provenance=origin)


def find(device: str, sms: int, shape: ModelShape, dtype: str = "bfloat16") -> Found:
    return find_calibration(device, sms, shape, dtype)


def put(one: Calibration, folder: Path | None = None) -> Path:
    shape = one.provenance.shape
    assert shape is not None
    path = default_path(one.device, one.total_sms, shape, one.provenance.dtype)
    path = path if folder is None else folder / path.name
    one.save(path)
    return path


def test_the_models_own_calibration_wins() -> None:
    mine = measured(LLAMA)
    put(measured(SMALL))
    path = put(mine)
    assert find(H200, 132, LLAMA) == (
        mine,
        f"measured on this machine for this model, {mine.provenance.samples} samples ({path})",
        True,
    )


def test_another_model_on_the_same_device_is_better_than_a_datasheet() -> None:
    put(measured(SMALL))
    path = put(measured(MIDDLE))
    found, source, _ = find(H200, 132, LLAMA)
    assert found == measured(MIDDLE), "the nearest in size"
    assert source == f"measured on this machine with another model ({path}); for this one run: bullet calibrate MODEL"


def test_what_is_measured_here_comes_before_what_is_shipped() -> None:
    put(measured(LLAMA), calibrations.PACKAGED)
    assert find(H200, 132, LLAMA)[1].startswith("shipped with bulletserve for this model")
    put(measured(SMALL))
    assert find(H200, 132, LLAMA)[0] == measured(SMALL)


@pytest.mark.parametrize("other", [{"sms": 66}, {"device": "NVIDIA H100 PCIe"}])
def test_another_device_or_a_part_of_it_does_not_count(other: dict[str, object]) -> None:
    put(measured(LLAMA, **other))  # type: ignore[arg-type]
    found, source, _ = find(H200, 132, LLAMA)
    assert found == datasheet(H200, 132)
    assert source.startswith("published peaks of NVIDIA H200") and source.endswith("bullet calibrate MODEL")


def test_an_unknown_device_has_none_and_says_what_to_do() -> None:
    found, source, _ = find("Abacus 3000", 4, LLAMA)
    assert found is None and source.endswith("make one with: bullet calibrate MODEL")


def test_numbers_of_another_size_do_not_count() -> None:
    put(measured(LLAMA, dtype="float32"))
    assert find(H200, 132, LLAMA)[0] == datasheet(H200, 132)
    put(measured(LLAMA, dtype="float16"))
    assert find(H200, 132, LLAMA)[0] == measured(LLAMA, dtype="float16"), "two bytes are two bytes"
    put(measured(LLAMA))
    assert len(list(cache_folder().iterdir())) == 3, "a dtype does not write over another"


def test_broken_files_and_samples_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    path = put(measured(LLAMA))
    samples_path(path).write_text("{}")
    for name, text in (("broken", "{"), ("deep", "[" * 100_000), ("list", "[]"), ("dated", put_text(path, "date", 7))):
        (cache_folder() / f"{name}.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert find(H200, 132, LLAMA)[0] == measured(LLAMA)
    assert len(caplog.records) == 4 and all(
        f"{name}.json" in caplog.text for name in ("broken", "deep", "list", "dated")
    )


def put_text(path: Path, name: str, value: object) -> str:
    """A calibration's file with another value in its provenance."""
    document = json.loads(path.read_text())
    document["provenance"][name] = value
    return json.dumps(document)


def test_of_equal_ones_the_newest_counts() -> None:
    put(measured(LLAMA, date="2026-01-01"))
    measured(LLAMA, date="2026-05-05").save(cache_folder() / "copy.json")
    found, *_ = find(H200, 132, LLAMA)
    assert found is not None and found.provenance.date == "2026-05-05"


def test_paths_name_device_width_and_shape() -> None:
    path = default_path("AMD EPYC(tm) 9R14 / 96-Core", 8, LLAMA, "float32")
    assert path == cache_folder() / f"amd-epyc-tm-9r14-96-core-8-{shape_hash(LLAMA)}-float32.json"
    assert samples_path(path).name == f"amd-epyc-tm-9r14-96-core-8-{shape_hash(LLAMA)}-float32.samples.json"
    assert calibration_path(samples_path(path)) == path
    assert partial_path(path).name.endswith(SAMPLES_SUFFIX) and partial_path(path) != samples_path(path)
    assert shape_hash(LLAMA) != shape_hash(SMALL)


def test_what_is_shipped_can_be_read_and_is_where_it_is_looked_for() -> None:
    """The H200 with two models, each by at most 80 samples and the power run's, judged by others."""
    shipped = sorted((Path(calibrations.__file__).parent / "data" / "calibrations").glob("*.json"))
    kinds = set()
    for path in shipped:
        one = load(path)
        origin, shape = one.provenance, one.provenance.shape
        assert origin.source == "measured" and shape is not None
        assert path.name == default_path(one.device, one.total_sms, shape, origin.dtype).name
        assert origin.samples <= MOST_SAMPLES + 7
        assert set(origin.holdout_errors) == set(GROUPS)
        kinds.add((one.device, shape.architecture))
    assert kinds == {(H200, "llama"), (H200, "qwen3")}


@pytest.mark.parametrize(("text", "architecture"), [("nvidia-h200", "llama"), ("qwen3", "qwen3"), ("Llama", "llama")])
def test_a_shipped_one_is_found_by_device_or_model(text: str, architecture: str) -> None:
    assert open_calibration(text).shape.architecture == architecture


def test_what_nobody_ships_is_said() -> None:
    with pytest.raises(ConfigError, match="shipped are nvidia-h200"):
        open_calibration("tpu")
