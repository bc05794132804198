"""The container against the safetensors library's own writer, and damage of every kind."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from bulletserve.core.errors import BrokenCheckpoint, ModelError, ModelMissing, UnsupportedModel
from bulletserve.formats.safetensors import SafetensorsFile


def test_what_the_library_writes_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    written = {
        "single": torch.randn(3, 4),
        "brain": torch.randn(2, 5, dtype=torch.bfloat16),
        "half": torch.randn(7, dtype=torch.float16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "ids": torch.arange(6).reshape(2, 3),
        "flags": torch.tensor([True, False]),
        "eight": torch.randn(4).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
    }
    path = tmp_path / "model.safetensors"
    save_file(written, path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    assert file.tensors.keys() == written.keys()
    for name, tensor in written.items():
        entry = file.tensors[name]
        assert f"torch.{entry.dtype}" == str(tensor.dtype)
        assert entry.shape == tuple(tensor.shape)
        bits = {"brain": torch.uint16, "eight": torch.uint8}.get(name)
        expected = tensor if bits is None else tensor.view(bits)
        array = file.read(entry)
        assert array.dtype == expected.numpy().dtype
        np.testing.assert_array_equal(array, expected.numpy())
        assert not array.flags.writeable


def write(path: Path, header: object, data: bytes = bytes(64)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (2, 2), offsets: object = (0, 16)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xff", "not UTF-8"),
        (b"[" * 50_000, "not valid JSON"),
        (b'{"t": ' + b"9" * 6000 + b"}", "not valid JSON"),
        ([], "expected a JSON object"),
        ({"t": 1}, "no dtype, shape and offsets"),
        ({"t": {"dtype": "F32", "shape": [2, 2]}}, "no dtype, shape and offsets"),
        ({"t": entry(offsets=(0, "16"))}, "no dtype, shape and offsets"),
        ({"t": entry(offsets=(0, 8, 16))}, "no dtype, shape and offsets"),
        ({"t": entry(shape=(-2, -2))}, r"has the shape \[-2, -2\]"),
        ({"t": entry(shape=(2, 2.0))}, "has the shape"),
        ({"t": entry(shape=(2, None))}, "has the shape"),
        ({"t": entry(shape=[1] * 9)}, "has the shape"),
        ({"t": entry(shape=(0, 2**40, 2**40), offsets=(0, 0))}, "has the shape"),
        ({"t": entry(offsets=(0, 12))}, "cannot lie at bytes 0 to 12"),
        ({"t": entry(offsets=(16, 0))}, "cannot lie at bytes 16 to 0"),
        ({"t": entry(offsets=(-16, 0))}, "cannot lie at bytes -16 to 0"),
        ({"t": entry(offsets=(60, 76))}, "cannot lie at bytes 60 to 76"),
    ],
)
def test_bad_headers_are_named(tmp_path: Path, header: object, named: str) -> None:
    with pytest.raises(BrokenCheckpoint, match=named) as caught:
        SafetensorsFile(write(tmp_path / "x.safetensors", header))
    assert "x.safetensors" in str(caught.value)


def test_dtypes_of_parts_of_a_byte_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'F4'; we read F64, F32"):
        SafetensorsFile(write(tmp_path / "x.safetensors", {"t": entry("F4")}))


def test_other_files_are_not_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for raw in (b"1234567", b"version https://git-lfs.github.com/spec/v1\n", (2**63).to_bytes(8, "little")):
        path.write_bytes(raw)
        with pytest.raises(BrokenCheckpoint, match="a header of"):
            SafetensorsFile(path)
    with pytest.raises(ModelMissing, match="absent"):
        SafetensorsFile(tmp_path / "absent")


WHOLE = save({"a": torch.ones(3, 3), "b": torch.ones(5, dtype=torch.bfloat16)})


def test_a_file_cut_anywhere_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    for length in range(len(WHOLE)):
        path.write_bytes(WHOLE[:length])
        with pytest.raises(BrokenCheckpoint):
            SafetensorsFile(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, len(WHOLE) - 40), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bytes_give_our_errors_or_tensors(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    raw = bytearray(WHOLE)
    for place, mask in flips:
        raw[place] ^= mask
    path = tmp_path / "flipped.safetensors"
    path.write_bytes(raw)
    try:
        file = SafetensorsFile(path)
        for tensor in file.tensors.values():
            assert file.read(tensor).shape == tensor.shape
    except ModelError as error:
        assert "flipped.safetensors" in str(error)
