"""A calibration's file, and what datasheets say."""

import json
from dataclasses import asdict, replace
from math import inf
from pathlib import Path

import pytest

from bulletserve.core.errors import ConfigError
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.shapes import ModelShape, RopeScaling
from bulletserve.estimator.calibration import Calibration, Provenance, datasheet, load
from bulletserve.estimator.estimator import Estimator
from bulletserve.estimator.parameters import BOUNDS, Parameters
from tests.estimator.devices import CAPPED, LLAMA_8B


def full() -> Calibration:
    shape = ModelShape("llama", 2, 8, 8, 2, 1, 4, 9, 64, rope_scaling=RopeScaling("llama3", 8.0))
    errors = {"mixed": {"median": 0.03, "p90": 0.08, "count": 12.0}}
    date, dtype = "2026-11-29T00:00:00+00:00", "bfloat16"
    origin = Provenance("measured", "580.1", "2.11.0", "abc123", date, 80, shape, dtype, holdout_errors=errors)
    return Calibration("NVIDIA H200", 132, CAPPED, origin)


@pytest.mark.parametrize("cap", [700.0, inf])
def test_a_file_gives_back_what_was_saved(tmp_path: Path, cap: float) -> None:
    made = replace(full(), parameters=replace(CAPPED, power_cap_w=cap))
    path = tmp_path / "deep" / "h200.json"
    made.save(path)
    assert load(path) == made
    assert load(path).hash == made.hash
    assert list(path.parent.iterdir()) == [path], "no draft is left"


def test_the_hash_is_of_the_constants() -> None:
    made = full()
    assert made.hash == replace(made, provenance=Provenance("datasheet")).hash
    assert made.hash != replace(made, parameters=replace(CAPPED, layer_s=13e-6)).hash


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parameters", None),
        ("parameters.matmul_flops", None),
        ("parameters.flop_j", -1.0),
        ("parameters.unheard_of", 1.0),
        ("parameters.power_cap_w", 1.0),
        ("format", 99),
        ("provenance", 3),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, key: str, value: object) -> None:
    document = json.loads(full().to_json())
    *outer, last = key.split(".")
    inner = document[outer[0]] if outer else document
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError):
        load(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"total_sms": 132', '"total_sms": 1e999'),
        ('"total_sms": 132', '"total_sms": NaN'),
        ('"total_sms": 132', '"total_sms": 0'),
        ('"total_sms": 132', '"total_sms": 99999999'),
        ('"num_layers": 32', '"num_layers": 0'),
        ('"num_layers": 32', '"num_layers": "many"'),
        ('"hidden_size": 4096', '"hidden_size": 1e300'),
        ('"num_kv_heads": 8', '"num_kv_heads": -8'),
        ('"date": ""', '"date": 7'),
        ('"top_clock_mhz": 1830.0', '"top_clock_mhz": 1e999'),
        ('"top_clock_mhz": 1830.0', '"top_clock_mhz": "x"'),
        ('"power_cap_w": 700.0', '"power_cap_w": true'),
        ('"total_sms": 132', '"total_sms": 2.7'),
        ('"total_sms": 132', '"total_sms": true'),
        ('"total_sms": 132', '"total_sms": 1e300'),
        ('"total_sms": 132', '"total_sms": "132"'),
        ('"graph_tokens": 512', '"graph_tokens": 2.7'),
        ('"graph_tokens": 512', '"graph_tokens": true'),
        ('"graph_tokens": 512', '"graph_tokens": 1e300'),
        ('"graph_tokens": 512', '"graph_tokens": -1'),
        ('"least_clock": 0.3', '"least_clock": 0'),
        ('"least_clock": 0.3', '"least_clock": -1'),
        ('"least_clock": 0.3', '"least_clock": 2'),
        ('"least_clock": 0.3', '"least_clock": "x"'),
        ('"least_clock": 0.3', '"least_clock": null'),
        ('"least_clock": 0.3', '"least_clock": true'),
        ('"overlap": 2.0', '"overlap": true'),
        ('"samples": 0', '"samples": -1'),
        ('"samples": 0', '"samples": "many"'),
        ('"samples": 0', '"samples": 2.5'),
        ('"holdout_errors": {}', '"holdout_errors": 7'),
        ('"holdout_errors": {}', '"holdout_errors": {"mixed": 0.1}'),
        ('"holdout_errors": {}', '"holdout_errors": {"mixed": {"median": "small"}}'),
        ('"holdout_errors": {}', '"holdout_errors": {"mixed": {"median": null}}'),
    ],
)
def test_numbers_that_no_device_or_model_has(old: str, new: str, tmp_path: Path) -> None:
    sheet = datasheet("NVIDIA H200", 132)
    assert sheet is not None
    text = replace(sheet, provenance=Provenance("datasheet", shape=LLAMA_8B)).to_json()
    assert Calibration.from_json(text).provenance.shape == LLAMA_8B
    assert old in text
    with pytest.raises(ConfigError):
        Calibration.from_json(text.replace(old, new))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[]", "7", '{"format": 3, "parameters": []}'])
def test_json_that_is_no_calibration(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match="no calibration"):
        load(tmp_path / "file")


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "none.json")
    (tmp_path / "text").write_text("not json")
    with pytest.raises(ConfigError, match="no calibration"):
        load(tmp_path / "text")


@pytest.mark.parametrize(
    ("name", "sms", "watts", "tb_s"),
    [
        ("NVIDIA A100-SXM4-80GB", 108, 400.0, 2.039),
        ("NVIDIA A100-SXM4-40GB", 108, 400.0, 1.555),
        ("NVIDIA A100 80GB PCIe", 108, 300.0, 1.935),
        ("NVIDIA H100 80GB HBM3", 132, 700.0, 3.35),
        ("NVIDIA H100 PCIe", 114, 350.0, 2.0),
        ("NVIDIA H200", 132, 700.0, 4.8),
        ("NVIDIA L4", 58, 72.0, 0.3),
        ("NVIDIA L40S", 142, 350.0, 0.864),
        ("NVIDIA B200", 148, 1000.0, 8.0),
    ],
)
def test_listed_devices(name: str, sms: int, watts: float, tb_s: float) -> None:
    found = datasheet(name, sms)
    assert found is not None
    assert found.provenance.source == "datasheet"
    assert found.total_sms == sms
    assert found.parameters.power_cap_w == watts
    assert found.parameters.device_bytes == pytest.approx(0.9e12 * tb_s)


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "cpu", "", "L400"])
def test_devices_that_are_not_listed(name: str) -> None:
    assert datasheet(name, 100) is None


def test_a_part_of_a_card_has_its_share() -> None:
    whole, half = datasheet("NVIDIA H200", 132), datasheet("NVIDIA H200", 66)
    assert whole is not None
    assert half is not None
    assert half.parameters.device_bytes == whole.parameters.device_bytes / 2
    assert half.parameters.matmul_flops == whole.parameters.matmul_flops
    assert half.parameters.power_cap_w == 350.0


def test_the_datasheet_of_an_h200_is_of_the_right_size() -> None:
    """Against the measured engine: within a third, which is what it is for."""
    found = datasheet("NVIDIA H200", 132)
    assert found is not None
    device = Estimator(found, LLAMA_8B)
    for step, measured_ms in (
        (StepShape.prefill([(2048, 0)], 32, 1), 49.1),
        (StepShape.decode(128, 128 * 1024, 32), 9.93),
        (StepShape.decode(32, 32 * 2048, 32), 6.91),
        (StepShape.decode(64, 64 * 4096, 32), 12.8),
    ):
        whole = Partition(0, 132) if step.kind == "decode" else Partition(132, 0)
        assert device.predict(step, whole).seconds * 1e3 == pytest.approx(measured_ms, rel=0.33)


@pytest.mark.parametrize("name", BOUNDS)
def test_constants_outside_their_bounds_are_refused(name: str) -> None:
    for value in (BOUNDS[name][0] * 0.5, BOUNDS[name][1] * 2.0, float("nan"), inf):
        with pytest.raises(ConfigError, match=name):
            Parameters(**(asdict(CAPPED) | {name: value}))
