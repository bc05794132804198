"""The container: what is written comes back, and no damage gives anything but a named error."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulletserve.core.errors import BrokenCheckpoint, ModelError, ModelMissing, UnsupportedModel
from bulletserve.formats.gguf import GgufFile
from bulletserve.formats.gguf_checkpoint import open_gguf

WriteGguf = Callable[..., Path]
TinyLlama = tuple[dict[str, object], list[tuple[str, tuple[int, ...], int, bytes]]]


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_type_comes_back(write_gguf: WriteGguf, version: int) -> None:
    written: dict[str, object] = {
        "text": "naïve 模型",
        "empty": "",
        "yes": True,
        "u8": np.uint8(200),
        "i8": np.int8(-100),
        "u16": np.uint16(60000),
        "i16": np.int16(-30000),
        "u32": 4_000_000_000,
        "i32": np.int32(-2_000_000_000),
        "u64": np.uint64(2**63 + 1),
        "i64": np.int64(-(2**62)),
        "f32": 0.25,
        "f64": np.float64(0.1),
        "words": ["a", "", "é"],
        "none": np.array([], np.int32),
        "i32s": np.array([1, -2, 3], np.int32),
        "f32s": np.array([0.5, -1.5], np.float32),
        "bools": np.array([True, False]),
    }
    read = GgufFile(write_gguf(written, version=version)).metadata
    expected = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in written.items()}
    assert read == expected
    assert read["yes"] is True
    assert [type(flag) for flag in read["bools"]] == [bool, bool]


@pytest.mark.parametrize("alignment", [32, 64, 8])
def test_plain_tensors_come_back(write_gguf: WriteGguf, alignment: int) -> None:
    numbers = np.random.default_rng(1)
    single = numbers.standard_normal((3, 5), dtype=np.float32)
    half = numbers.standard_normal((2, 3, 4)).astype(np.float16)
    bits = numbers.integers(0, 1 << 16, 7, dtype=np.uint16)
    tensors = [
        ("single", single.shape, 0, single.tobytes()),
        ("half", half.shape, 1, half.tobytes()),
        ("brain", bits.shape, 30, bits.tobytes()),
    ]
    metadata = {"general.alignment": alignment}
    file = GgufFile(write_gguf(metadata, tensors, alignment=alignment))
    assert list(file.tensors) == ["single", "half", "brain"]
    for array, name, dtype in ((single, "single", "float32"), (half, "half", "float16"), (bits, "brain", "bfloat16")):
        assert file.tensors[name].encoding.dtype == dtype
        result = file.read(file.tensors[name])
        assert result.dtype == array.dtype
        np.testing.assert_array_equal(result, array)


def test_quantised_rows_keep_their_place(write_gguf: WriteGguf) -> None:
    """Two rows of 64 in Q8_0: four blocks, the block's number as its factor and 0, 1, 2, ... as its integers."""
    raw = b"".join(struct.pack("<e", block) + bytes(range(32)) for block in range(4))
    file = GgufFile(write_gguf({}, [("t", (2, 64), 8, raw)]))
    expected = [[(2 * row + column // 32) * (column % 32) for column in range(64)] for row in range(2)]
    np.testing.assert_array_equal(file.read(file.tensors["t"]), np.array(expected, np.float32))


def broken(path: Path) -> str:
    with pytest.raises(BrokenCheckpoint) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_other_files_are_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"")
    assert "empty" in broken(path)
    path.write_bytes(b"GG")
    assert "not a GGUF file" in broken(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "not a GGUF file" in broken(path)
    with pytest.raises(ModelMissing, match=r"absent\.gguf"):
        GgufFile(tmp_path / "absent.gguf")
    with pytest.raises(ModelMissing):
        GgufFile(tmp_path)


@pytest.mark.parametrize(("version", "named"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_other_versions_are_named(write_gguf: WriteGguf, version: int, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        GgufFile(write_gguf({}, version=version))


HEAD = b"GGUF" + struct.pack("<I", 3)
HUGE = 2**62


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (HEAD + struct.pack("<QQ", HUGE, 0) + bytes(99), "tensors"),
        (HEAD + struct.pack("<QQ", 0, HUGE) + bytes(99), "metadata entries"),
        (HEAD + struct.pack("<QQQ", 0, 1, HUGE) + bytes(99), "ends within a metadata key"),
        (HEAD + struct.pack("<QQQsIQ", 0, 1, 1, b"k", 8, HUGE) + bytes(99), "'k'"),
        (HEAD + struct.pack("<QQQsIIQ", 0, 1, 1, b"k", 9, 8, HUGE) + bytes(99), "elements of 'k'"),
        (HEAD + struct.pack("<QQQsIIQ", 0, 1, 1, b"k", 9, 12, HUGE) + bytes(99), "elements of 'k'"),
        (HEAD + struct.pack("<QQQsIIQ", 0, 1, 1, b"k", 9, 9, 1) + bytes(99), "array of the unknown type 9"),
        (HEAD + struct.pack("<QQQsI", 0, 1, 1, b"k", 13) + bytes(99), "unknown type 13"),
        (HEAD + struct.pack("<QQQsI", 1, 0, 1, b"t", 5) + bytes(99), "5 dimensions"),
        (HEAD + struct.pack("<QQQsI", 1, 0, 1, b"t", 0) + bytes(99), "0 dimensions"),
        (HEAD + struct.pack("<QQQsIQIQ", 1, 0, 1, b"t", 1, 0, 0, 0) + bytes(99), "shape"),
        (HEAD + struct.pack("<QQQsIQIQ", 1, 0, 1, b"t", 1, HUGE, 0, 0) + bytes(99), "ends at byte"),
        (HEAD + struct.pack("<QQQsIQIQ", 1, 0, 1, b"t", 1, 4, 0, HUGE) + bytes(99), "ends at byte"),
        (HEAD + struct.pack("<QQQsIQIQ", 1, 0, 1, b"t", 1, 4, 0, 3) + bytes(99), "no multiple of 32"),
        (HEAD + struct.pack("<QQQsIQIQ", 1, 0, 1, b"t", 1, 33, 8, 0) + bytes(99), "cannot be Q8_0"),
        (HEAD + struct.pack("<QQQsIQIQ", 1, 0, 1, b"t", 1, 4, 77, 0) + bytes(99), "unknown type 77"),
    ],
)
def test_absurd_numbers_are_refused(tmp_path: Path, raw: bytes, named: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    assert named in broken(path)


def test_text_must_be_utf8_and_names_unique(write_gguf: WriteGguf) -> None:
    assert "not UTF-8" in broken(write_gguf({"k": b"\xff\xfe"}))
    assert "not UTF-8" in broken(write_gguf({b"\xc3": 1}))
    assert "'k' appears twice" in broken(write_gguf({"k": 1, b"k": 2}))
    twice = ("t", (1,), 0, bytes(4))
    assert "'t' appears twice" in broken(write_gguf({}, [twice, twice]))
    assert "general.alignment" in broken(write_gguf({"general.alignment": 0}))


def test_unread_encodings_are_named_with_those_we_read(write_gguf: WriteGguf) -> None:
    with pytest.raises(UnsupportedModel, match=r"IQ4_XS; we read F32, F16, Q4_0.*BF16"):
        GgufFile(write_gguf({}, [("t", (256,), 23, bytes(136))]))


def test_a_file_cut_anywhere_is_broken(gguf_bytes: Callable[..., bytes], tiny_llama: TinyLlama, tmp_path: Path) -> None:
    whole = gguf_bytes(*tiny_llama)
    path = tmp_path / "cut.gguf"
    for length in [*range(200), *range(200, len(whole), 11), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(BrokenCheckpoint, match=r"cut\.gguf"):
            open_gguf(path)
    path.write_bytes(whole)
    assert open_gguf(path).shape.num_layers == 1


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_give_our_errors_or_a_model(
    gguf_bytes: Callable[..., bytes], tiny_llama: TinyLlama, tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    raw = bytearray(gguf_bytes(*tiny_llama))
    head = raw.rindex(b"output_norm.weight") + 64  # flips in the data are harmless: most go before it
    for place, mask in flips:
        raw[place % head] ^= mask
    path = tmp_path / "flipped.gguf"
    path.write_bytes(raw)
    try:
        for tensor in open_gguf(path).tensors():
            assert tensor.read().shape == tensor.shape
    except ModelError as error:
        assert "flipped.gguf" in str(error)
