"""Which matrix product to run: the ways there are, how each divides its work, and a table of what measured best.

Knows nothing about Triton or a GPU: arithmetic and a JSON file. A choice is measured for a weight [N, K], a number of
rows M (a bucket) and a number of SMs. Tables are only as good as the card, the compiler, the kernels and the way of
measuring behind them, so all of these are part of a table's key and a table with another key is not loaded.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self

from bulletserve.cache_files import cache_root, write_whole
from bulletserve.core.errors import ConfigError
from bulletserve.core.json_text import parse_json

Kind = Literal["cublas", "cublaslt", "triton"]
Stream = Literal["none", "tail", "split"]

_MOST_SHARERS = 4  # programs for a tile of the last wave
_LEAST_ITERATIONS = 4  # steps of K that are worth a program of their own


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to do a product. All but `kind` describe our own kernel and are zero for the libraries.

    `swap`: the weight is the tensor cores' first operand (few rows). `per_sm`: programs per SM. `chunks`: pieces
    in which a tile is written (1, 2 or 4). `stream`: which tiles several programs share: "none"; "tail": those
    that would leave the last wave part-filled, evenly; "split": all, each by equally many programs, where there are
    more programs than tiles, else like "tail".
    """

    kind: Kind
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    warps: int = 0
    stages: int = 0
    swap: bool = False
    stream: Stream = "none"
    chunks: int = 1
    per_sm: int = 1

    @property
    def kernel(self) -> tuple[int | bool, ...]:
        """What of it is compiled: choices alike in this share a kernel."""
        return self.block_m, self.block_n, self.block_k, self.warps, self.stages, self.swap, self.chunks

    @property
    def capture_only(self) -> bool:
        """Whether it needs process-wide state, and so may run only while graphs are captured at start."""
        return self.kind == "cublaslt"


CUBLAS = Choice("cublas")
CUBLASLT = Choice("cublaslt")


def schedule(choice: Choice, rows: int, cols: int, inner: int, sms: int) -> tuple[int, int]:
    """(programs, leading tiles that they share) of a product [rows, cols] over `inner` on `sms` SMs.

    Fewer than two tiles per program are ever shared, and no program goes without work.
    """
    tiles = -(-rows // choice.block_m) * -(-cols // choice.block_n)
    k_tiles = -(-inner // choice.block_k)
    slots = sms * choice.per_sm
    if choice.stream == "none":
        return min(slots, tiles), 0
    if choice.stream == "split" and tiles <= slots:
        return tiles * min(slots // tiles, max(1, k_tiles // _LEAST_ITERATIONS)), tiles
    if tiles < slots:
        return min(slots, max(1, tiles * k_tiles // _LEAST_ITERATIONS)), tiles
    left_over = tiles % slots
    few = left_over * _MOST_SHARERS < slots  # a tile cut in too many pieces takes longer to put together than to do
    return slots, left_over + slots if left_over and few else left_over


def most_streamed_tiles(sms: int, per_sm: int) -> int:
    """What `schedule` never exceeds: how many counters a lane needs."""
    return 2 * sms * per_sm


@dataclass(frozen=True, slots=True)
class TableKey:
    """All that a table's figures depend on."""

    gpu: str
    sms: int
    dtype: str
    torch: str
    triton: str
    kernels: str

    @classmethod
    def of(cls, gpu: str, sms: int, dtype: str) -> Self:
        """The key of this process's software on `gpu` with `sms` SMs in all."""
        files = ("matmul_kernel.py", "matmul_choice.py", "matmul_tuning.py", "neighbour.py")
        source = b"".join((Path(__file__).parent / name).read_bytes() for name in files)
        kernels = hashlib.sha256(source).hexdigest()[:16]
        return cls(gpu, sms, dtype, metadata.version("torch"), _triton_version(), kernels)


def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


@dataclass(frozen=True, slots=True)
class Cell:
    """The best way of all, and the best of those that need no process-wide state."""

    captured: Choice
    eager: Choice


@dataclass(slots=True)
class ChoiceTable:
    """Best choices by weight shape (N, K), SMs and row bucket. Changed only while it is tuned or merged at start."""

    key: TableKey
    cells: dict[tuple[int, int], dict[int, dict[int, Cell]]] = field(default_factory=dict)
    _rows: dict[tuple[int, int, int], tuple[list[int], list[Cell]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def choose(self, n: int, k: int, m: int, sms: int, capturing: bool) -> Choice:
        """For m rows of a weight [n, k]: the smallest bucket that holds m (else the last), the nearest tuned `sms`.

        Without `capturing`, never one that is `capture_only`. Falls back to cuBLAS where nothing was measured.
        """
        row = self._rows.get((n, k, sms))
        if row is None:
            row = self._rows[n, k, sms] = self._row(n, k, sms)
        buckets, cells = row
        if not cells:
            return CUBLAS
        cell = cells[min(bisect_left(buckets, m), len(cells) - 1)]
        return cell.captured if capturing else cell.eager

    def _row(self, n: int, k: int, sms: int) -> tuple[list[int], list[Cell]]:
        shares = self.cells.get((n, k))
        if not shares:
            return [], []
        nearest = shares[min(shares, key=lambda tuned: (abs(tuned - sms), tuned))]
        buckets = sorted(nearest)
        return buckets, [nearest[bucket] for bucket in buckets]

    def put(self, n: int, k: int, m: int, sms: int, cell: Cell) -> None:
        """Records what was measured for m rows of a weight [n, k] on `sms` SMs."""
        self.cells.setdefault((n, k), {}).setdefault(sms, {})[m] = cell
        self._rows.clear()

    def merge(self, other: "ChoiceTable") -> None:
        """Takes over every cell of `other` (same key, else ConfigError)."""
        if other.key != self.key:
            raise ConfigError(f"cannot merge matmul tables measured with {other.key} and with {self.key}")
        for n, k, sms, m, cell in other:
            self.put(n, k, m, sms, cell)

    def __iter__(self) -> Iterator[tuple[int, int, int, int, Cell]]:
        """Every (n, k, sms, bucket, cell)."""
        for (n, k), shares in self.cells.items():
            for sms, buckets in shares.items():
                for m, cell in buckets.items():
                    yield n, k, sms, m, cell

    def choices(self, n: int, k: int) -> list[Choice]:
        """Every different choice of a weight [n, k], in the order of first appearance."""
        cells = [cell for shares in self.cells.get((n, k), {}).values() for cell in shares.values()]
        return list(dict.fromkeys(choice for cell in cells for choice in (cell.captured, cell.eager)))

    def to_json(self) -> str:
        """The table as one JSON document."""
        rows = [
            {"n": n, "k": k, "sms": sms, "m": m, "captured": asdict(cell.captured), "eager": asdict(cell.eager)}
            for n, k, sms, m, cell in self
        ]
        return json.dumps({"key": asdict(self.key), "cells": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ChoiceTable":
        """The table that `to_json` wrote. Raises ConfigError if it is none."""
        try:
            document: Mapping[str, Any] = parse_json(text)
            table = cls(TableKey(**document["key"]))
            for row in document["cells"]:
                cell = Cell(Choice(**row["captured"]), Choice(**row["eager"]))
                table.put(row["n"], row["k"], row["m"], row["sms"], cell)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"not a matmul table: {error!r}") from error
        return table

    @classmethod
    def load(cls, path: Path, key: TableKey) -> "ChoiceTable | None":
        """The table at `path`, or None where there is none, it is damaged or its key is not `key`."""
        try:
            table = cls.from_json(path.read_text())
        except (OSError, UnicodeDecodeError, ConfigError):
            return None
        return table if table.key == key else None

    def save(self, path: Path) -> None:
        """Writes the table to `path` in one step, so that no reader ever sees half of it."""
        write_whole(path, self.to_json())


def default_path(key: TableKey) -> Path:
    """Where the table with this key lives: $XDG_CACHE_HOME/bulletserve or ~/.cache/bulletserve."""
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:16]
    return cache_root() / f"matmul-{digest}.json"
