"""A step's work as times on one SM: what forecasts of it on any share have in common.

Knows nothing about shares, clocks or neighbours. Flops and bytes are linear in a step's counts, so a model is read off
`core/operators` once, as what each operator costs a row, a token or a pair; a step is then a few products. Operators
that are limited alike are one row: all products of the same rows (nearly the same flops a byte), all that is bytes
only. Per row C seconds of arithmetic and S of loads on one SM, D seconds of the device's memory, each raised to the
exponent with which `roofs` joins them.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from bulletserve.core.operators import Operator, StepShape, attended, operators
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.parameters import Parameters
from bulletserve.estimator.waves import same_tiles


class Tiled:
    """Some products of the same rows: the columns of each, and its share of their flops. Memos know it by identity,
    so each model has but one of each."""

    __slots__ = ("products",)

    def __init__(self, products: Iterable[tuple[int, float]]) -> None:
        self.products = tuple(products)


NO_PRODUCTS = Tiled(())


WorkRow = tuple[float, float, float, int, float, Tiled]
"""One operator or several alike: C^p, S^k, D^k; of products the greatest count of rows that is cut into the same tiles
as theirs (0: no product), their own count to the power -p, and their columns."""


class Work(NamedTuple):
    """One step. `launch_s` and `least_s`: its launch constants and the host's time, below which it cannot fall.

    `sm_j` is the energy that falls with the clock, `memory_j` that which does not; `moved_s` the time of all bytes at
    the device's bandwidth. `whole`: its products are cut into whole tiles on a share of the SMs, as `waves` says.
    """

    rows: tuple[WorkRow, ...]
    launch_s: float
    least_s: float
    sm_j: float
    memory_j: float
    moved_s: float
    whole: bool


class _Products(NamedTuple):
    """Some products of the same rows: flops and activation bytes a row, bytes of weights."""

    flops: int
    row_bytes: int
    weight_bytes: int
    tiled: Tiled


class _Attention(NamedTuple):
    """Flops a (query, key) pair; bytes a query and a token whose K and V are read."""

    flops: int
    query_bytes: int
    kv_bytes: int


class _Counts(NamedTuple):
    """A model: of one layer, and of norm, head and sampling behind the last."""

    layer: _Products
    head: _Products
    prefill: _Attention
    decode: _Attention
    row_bytes: int
    sampled_bytes: int


_HALF_TILE = 64
"""Rows of half a tile of prompt attention: with each key of a prompt, so many queries beyond the diagonal, or beyond
the prompt's last, are computed for nothing."""

_ONE_OF_EACH = StepShape(1, 1, 1, 1, 1, 1, 1)
"""A prompt token, a decode row, one layer."""


@lru_cache(maxsize=64)
def _counts(shape: ModelShape, dtype_bytes: int) -> _Counts:
    listed = operators(shape, _ONE_OF_EACH, dtype_bytes)
    attention = {each.name: _Attention(each.flops, each.activation_bytes, each.kv_bytes) for each in listed}
    rest = [each for each in listed if not each.flops]
    tail = ("final_norm", "sampling")
    return _Counts(
        layer=_products([each for each in listed if each.m and each.name != "head"]),
        head=_products([each for each in listed if each.name == "head"]),
        prefill=attention["prefill_attention"],
        decode=attention["decode_attention"],
        row_bytes=sum(each.bytes * each.count for each in rest if each.name not in tail) // _ONE_OF_EACH.rows,
        sampled_bytes=sum(each.bytes * each.count for each in rest if each.name in tail),
    )


def _products(alike: list[Operator]) -> _Products:
    flops = sum(each.flops for each in alike)
    return _Products(
        flops // alike[0].m,
        sum(each.activation_bytes for each in alike) // alike[0].m,
        sum(each.weight_bytes for each in alike),
        Tiled((each.n, each.flops / flops) for each in alike),
    )


class ModelWork:
    """The steps of one model on a device with given constants."""

    def __init__(self, constants: Parameters, shape: ModelShape, dtype_bytes: int = 2) -> None:
        self._constants, self._shape, self._dtype_bytes = constants, shape, dtype_bytes
        self._counts = _counts(shape, dtype_bytes)
        self.layer_tiled, self.head_tiled = self._counts.layer.tiled, self._counts.head.tiled
        self.decode_tiled = _with_head(shape, dtype_bytes, shape.num_layers)
        k = constants.knee
        self._stream_to_device = (constants.stream_bytes / constants.device_bytes) ** k
        self._attention_to_device = (constants.attention_bytes / constants.device_bytes) ** k

    def of(self, step: StepShape) -> Work:
        """What `step` is."""
        tokens, pairs, read, decode_rows, context, layers, sampled = step
        constants, counts, rows = self._constants, self._counts, tokens + decode_rows
        layer, head = counts.layer, counts.head
        flops, moved = layers * rows * layer.flops, layers * (layer.weight_bytes + rows * layer.row_bytes)
        elementwise = layers * rows * counts.row_bytes + sampled * counts.sampled_bytes
        tiled = layer.tiled
        work_rows: list[WorkRow] = []
        total_flops, total_moved = 0, elementwise
        if sampled:
            head_flops, head_moved = sampled * head.flops, head.weight_bytes + sampled * head.row_bytes
            if sampled == rows and not tokens:
                whole = layers == self._shape.num_layers
                tiled = self.decode_tiled if whole else _with_head(self._shape, self._dtype_bytes, layers)
                flops, moved = flops + head_flops, moved + head_moved
            elif sampled == 1:  # a vector times a matrix is bytes only, on any device
                elementwise, total_flops, total_moved = elementwise + head_moved, head_flops, total_moved + head_moved
            else:
                work_rows.append(self._product(head_flops, head_moved, sampled, head.tiled))
                total_flops, total_moved = head_flops, total_moved + head_moved
        total_flops, total_moved = total_flops + flops, total_moved + moved
        if layers:
            work_rows.append(self._product(flops, moved, rows, tiled))
        if self._shape.sliding_window is not None:
            pairs, context = attended(self._shape, step)
        if layers and tokens:
            one = counts.prefill
            flops = layers * pairs * one.flops
            moved = layers * (tokens * one.query_bytes + read * one.kv_bytes)
            tiled_flops = flops + layers * _HALF_TILE * self._keys(tokens, read) * one.flops
            work_rows.append(self._attention(tiled_flops, moved, constants.stream_bytes, self._stream_to_device))
            total_flops, total_moved = total_flops + flops, total_moved + moved
        if layers and decode_rows:
            one = counts.decode
            flops = layers * context * one.flops
            moved = layers * (decode_rows * one.query_bytes + context * one.kv_bytes)
            work_rows.append(self._attention(flops, moved, constants.attention_bytes, self._attention_to_device))
            total_flops, total_moved = total_flops + flops, total_moved + moved
        loads = (elementwise / constants.stream_bytes) ** constants.knee
        work_rows.append((0.0, loads, loads * self._stream_to_device, 0, 0.0, NO_PRODUCTS))
        launch_s, least_s = _launch(constants, step)
        return Work(
            tuple(work_rows),
            launch_s,
            least_s,
            total_flops * constants.flop_j,
            total_moved * constants.byte_j,
            total_moved / constants.device_bytes,
            not decode_rows,
        )

    def _keys(self, tokens: int, context: int) -> int:
        """Keys that tiles of prompt attention pass, each once, within the model's window."""
        window = self._shape.sliding_window
        return context if window is None else min(context, tokens + window)

    def _product(self, flops: int, moved: int, rows: int, tiled: Tiled) -> WorkRow:
        constants = self._constants
        loads = (moved / constants.stream_bytes) ** constants.knee
        compute = (flops / constants.matmul_flops) ** constants.overlap
        return compute, loads, loads * self._stream_to_device, same_tiles(rows), rows**-constants.overlap, tiled

    def _attention(self, flops: int, moved: int, per_sm: float, to_device: float) -> WorkRow:
        constants = self._constants
        loads = (moved / per_sm) ** constants.knee
        return (flops / constants.attention_flops) ** constants.overlap, loads, loads * to_device, 0, 0.0, NO_PRODUCTS


@lru_cache(maxsize=1024)
def _with_head(shape: ModelShape, dtype_bytes: int, layers: int) -> Tiled:
    """The products of `layers` layers and the head as one, where all their rows are sampled."""
    counts = _counts(shape, dtype_bytes)
    layer, head = counts.layer, counts.head
    share = layers * layer.flops / (layers * layer.flops + head.flops)
    ((columns, _),) = head.tiled.products
    return Tiled((*((n, part * share) for n, part in layer.tiled.products), (columns, 1.0 - share)))


def _launch(constants: Parameters, step: StepShape) -> tuple[float, float]:
    layer_s = constants.layer_s + (constants.decode_layer_s if step.decode_rows else 0.0)
    launch_s = step.layers * layer_s + (constants.tail_s if step.sampled else 0.0)
    eager = step.prefill_tokens and step.rows > constants.graph_tokens
    return launch_s, step.layers * constants.host_layer_s if eager else 0.0
