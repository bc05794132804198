"""GGUF: one file with metadata, a directory of tensors, and their data.

Knows the container only: nothing about architectures, names of tensors or tokenizers (`gguf_checkpoint`
does). Layout, all little endian, strings as a 64-bit length and UTF-8:

    "GGUF", version (2 or 3), number of tensors, number of metadata entries
    entries:   key, type, value            (an array is: element type, length, elements)
    directory: name, number of dimensions, dimensions innermost first, encoding, offset into the data
    padding to `general.alignment` (32), then the data

Every length in the file is checked against what is left of it before anything is read or allocated, so a
damaged file costs no more than a good one of its size and ends in `BrokenCheckpoint`.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from bulletserve.core.errors import BrokenCheckpoint, UnsupportedModel
from bulletserve.formats.description import Array
from bulletserve.formats.files import map_file
from bulletserve.formats.gguf_blocks import FORMATS, UNREAD, BlockFormat, dequantise

Value: TypeAlias = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MAX_DIMENSIONS = 4  # ggml's GGML_MAX_DIMS
_SMALLEST_ENTRY_BYTES = 8 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One line of the directory. `shape` is row-major; `start` is the file's byte where the data begins."""

    name: str
    shape: tuple[int, ...]
    encoding: BlockFormat
    start: int

    @property
    def blocks(self) -> int:
        """Number of blocks; rows are whole numbers of them."""
        return math.prod(self.shape) // self.encoding.weights


class GgufFile:
    """An open GGUF file: `metadata` and `tensors` (in file order) are read at once, the data only by `read`.

    Raises `ModelMissing` if there is no such file, `BrokenCheckpoint` if it is damaged, `UnsupportedModel`
    if it is of another version or byte order, or has a tensor in an encoding that is not in `gguf_blocks`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        cursor = _Cursor(self._data, path)
        tensor_count, entry_count = cursor.header()
        self.metadata: Mapping[str, Value] = cursor.metadata(entry_count)
        self.tensors: Mapping[str, GgufTensor] = cursor.directory(tensor_count, self._alignment())

    def read(self, tensor: GgufTensor) -> Array:
        """The weights in `tensor.shape`: float32, fresh, if quantised; else a read-only view of the file.

        bfloat16 comes as its bits in uint16.
        """
        blocks = np.frombuffer(self._data, tensor.encoding.block, tensor.blocks, tensor.start)
        return dequantise(blocks, tensor.encoding).reshape(tensor.shape)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise BrokenCheckpoint(f"{self.path}: general.alignment is {alignment!r:.40}")
        return alignment


class _Cursor:
    """Reads forward through the part before the data, and checks every length before using it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def header(self) -> tuple[int, int]:
        """Number of tensors and of metadata entries."""
        if self._data[:4] != b"GGUF":
            raise self._broken(f"not a GGUF file: it starts with {self._data[:4]!r}")
        self._take(4, "the magic")
        version = self._integer(_U32, "the version")
        if version not in (2, 3):
            kind = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
            raise UnsupportedModel(f"{self._path}: {kind} GGUF; versions 2 and 3, little endian, are read")
        return self._count(_SMALLEST_TENSOR_BYTES, "tensors"), self._count(_SMALLEST_ENTRY_BYTES, "metadata entries")

    def metadata(self, count: int) -> dict[str, Value]:
        """All entries by key."""
        entries: dict[str, Value] = {}
        for _ in range(count):
            key = self._text("a metadata key")
            if key in entries:
                raise self._broken(f"metadata key {key!r:.80} appears twice")
            entries[key] = self._value(key)
        return entries

    def directory(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        """All tensors by name, each proved to lie inside the file."""
        lines = [self._line() for _ in range(count)]
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, encoding, offset in lines:
            if name in tensors:
                raise self._broken(f"tensor {name!r:.80} appears twice")
            tensor = GgufTensor(name, shape, encoding, base + offset)
            end = tensor.start + tensor.blocks * encoding.block.itemsize
            if end > len(self._data):
                raise self._broken(f"tensor {name!r:.80} ends at byte {end} of {len(self._data)}")
            if offset % alignment:
                raise self._broken(f"tensor {name!r:.80} starts at {offset}, no multiple of {alignment}")
            tensors[name] = tensor
        return tensors

    def _line(self) -> tuple[str, tuple[int, ...], BlockFormat, int]:
        name = self._text("a tensor's name")
        dimensions = self._integer(_U32, "a tensor's dimensions")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._broken(f"tensor {name!r:.80} has {dimensions} dimensions")
        # innermost first in the file; numpy and Hugging Face have it last
        shape = tuple(self._integer(_U64, "a tensor's shape") for _ in range(dimensions))[::-1]
        number = self._integer(_U32, "a tensor's type")
        encoding = FORMATS.get(number)
        if number in UNREAD:
            names = ", ".join(known.name for known in FORMATS.values())
            raise UnsupportedModel(f"{self._path}: tensor {name!r:.80} is {UNREAD[number]}; we read {names}")
        if encoding is None:
            raise self._broken(f"tensor {name!r:.80} has the unknown type {number}")
        if min(shape) < 1 or shape[-1] % encoding.weights:
            raise self._broken(f"tensor {name!r:.80} of shape {shape} cannot be {encoding.name}")
        return name, shape, encoding, self._integer(_U64, "a tensor's offset")

    def _value(self, key: str) -> Value:
        kind = self._integer(_U32, f"the type of {key!r:.80}")
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            return self._text(f"{key!r:.80}")
        if kind not in _SCALARS:
            raise self._broken(f"metadata {key!r:.80} has the unknown type {kind}")
        scalar = _SCALARS[kind]
        value: int | float | bool = scalar.unpack_from(self._data, self._take(scalar.size, f"{key!r:.80}"))[0]
        return value

    def _array(self, key: str) -> Value:
        kind = self._integer(_U32, f"the element type of {key!r:.80}")
        if kind == _STRING:
            what = f"an element of {key!r:.80}"
            return [self._text(what) for _ in range(self._count(8, f"elements of {key!r:.80}"))]
        if kind not in _SCALARS:  # arrays of arrays are legal, but no key of these models holds one
            raise self._broken(f"metadata {key!r:.80} is an array of the unknown type {kind}")
        scalar = _SCALARS[kind]
        count = self._count(scalar.size, f"elements of {key!r:.80}")
        start = self._take(count * scalar.size, f"{key!r:.80}")
        values: list[int] | list[float] = np.frombuffer(self._data, scalar.format, count, start).tolist()
        return values

    def _count(self, smallest: int, what: str) -> int:
        """A number of things of at least `smallest` bytes each, refused if the file cannot hold them."""
        count = self._integer(_U64, f"the number of {what}")
        if count * smallest > len(self._data) - self._at:
            raise self._broken(f"it claims {count} {what}, more than the file can hold")
        return count

    def _text(self, what: str) -> str:
        length = self._integer(_U64, what)
        start = self._take(length, what)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self._broken(f"{what} at byte {start} is not UTF-8") from None

    def _integer(self, scalar: struct.Struct, what: str) -> int:
        value: int = scalar.unpack_from(self._data, self._take(scalar.size, what))[0]
        return value

    def _take(self, size: int, what: str) -> int:
        """Move past `size` bytes; where they start."""
        start = self._at
        if size > len(self._data) - start:
            raise self._broken(f"the file ends within {what} (byte {start} of {len(self._data)})")
        self._at = start + size
        return start

    def _broken(self, cause: str) -> BrokenCheckpoint:
        return BrokenCheckpoint(f"{self._path}: {cause}")
