"""safetensors: one file with a JSON header and the tensors' bytes behind it.

Knows the container only. Layout: the header's length (64 bits, little endian), the header

    {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}, .., "__metadata__": {..}}

and the data, which the offsets count from; row-major, little endian. Everything in the header is checked
against the file's size before it is used.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bulletserve.core.errors import BrokenCheckpoint, UnsupportedModel
from bulletserve.formats.description import Array
from bulletserve.formats.files import map_file, parse_json

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMENSIONS = 8
_MAX_ELEMENTS = 1 << 48  # with empty dimensions counted as one, as numpy does

# Tag and numpy dtype. numpy has neither bfloat16 nor eight-bit floats: those are raw bits.
_DTYPES = {
    "F64": ("float64", "<f8"),
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
    "F8_E4M3": ("float8_e4m3fn", "u1"),
    "F8_E5M2": ("float8_e5m2", "u1"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "I16": ("int16", "<i2"),
    "I8": ("int8", "i1"),
    "U64": ("uint64", "<u8"),
    "U32": ("uint32", "<u4"),
    "U16": ("uint16", "<u2"),
    "U8": ("uint8", "u1"),
    "BOOL": ("bool", "?"),
}


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """One entry of the header. `dtype` is torch's name; `start` is the file's byte where the data begins."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: np.dtype[np.generic]
    start: int


class SafetensorsFile:
    """An open file: `tensors` by name is read at once, in the header's order; the data only by `read`.

    Raises `ModelMissing` if there is no such file, `BrokenCheckpoint` if it is damaged, `UnsupportedModel`
    for a dtype of less than a byte.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        self.tensors: Mapping[str, SafeTensor] = self._header()

    def read(self, tensor: SafeTensor) -> Array:
        """A read-only view of the file in `tensor.shape`; bfloat16 as its bits in uint16."""
        count = math.prod(tensor.shape)
        return np.frombuffer(self._data, tensor.storage, count, tensor.start).reshape(tensor.shape)

    def _header(self) -> dict[str, SafeTensor]:
        length = int.from_bytes(self._data[:8], "little")
        if len(self._data) < 8 or length > min(len(self._data) - 8, _MAX_HEADER_BYTES):
            raise self._broken(f"a header of {length} bytes in a file of {len(self._data)}")
        try:
            text = self._data[8 : 8 + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self._broken("the header is not UTF-8") from None
        entries = parse_json(text, f"{self.path}: header")
        return {name: self._entry(name, entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"}

    def _entry(self, name: str, entry: object, base: int) -> SafeTensor:
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
                pass
            case _:
                raise self._broken(f"tensor {name!r:.80} has no dtype, shape and offsets")
        ints = all(type(size) is int and size >= 0 for size in shape)
        if not ints or len(shape) > _MAX_DIMENSIONS or math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:
            raise self._broken(f"tensor {name!r:.80} has the shape {shape!r:.80}")
        if dtype not in _DTYPES:
            raise UnsupportedModel(f"{self.path}: tensor {name!r:.80} is {dtype!r:.40}; we read {', '.join(_DTYPES)}")
        tag, storage = _DTYPES[dtype][0], np.dtype(_DTYPES[dtype][1])
        if end - begin != math.prod(shape) * storage.itemsize or not 0 <= begin <= end <= len(self._data) - base:
            raise self._broken(f"tensor {name!r:.80} of shape {shape!r:.80} cannot lie at bytes {begin} to {end}")
        return SafeTensor(name, tuple(shape), tag, storage, base + begin)

    def _broken(self, cause: str) -> BrokenCheckpoint:
        return BrokenCheckpoint(f"{self.path}: {cause}")
