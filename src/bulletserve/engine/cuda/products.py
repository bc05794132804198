"""Which matrix product runs where: a table for this GPU and model, read from the cache or measured at start.

Knows nothing about how a product is measured (`kernels/cuda/matmul_tuning`). Only what the table lacks is measured: a
new model of known shapes, or a second start, costs nothing.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bulletserve.core.plan import Lane
from bulletserve.kernels.cuda.matmul import MatmulScratch, Weight
from bulletserve.kernels.cuda.matmul_choice import ChoiceTable, TableKey, default_path
from bulletserve.kernels.cuda.matmul_tuning import Place, Shape, tune, warm
from bulletserve.kernels.cuda.neighbour import LOAD_ELEMENTS, Kind, Neighbour
from bulletserve.models.decoder import Decoder
from bulletserve.resources.manager import PartitionManager

_log = logging.getLogger(__name__)

LAYER_BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 576, 640, 768, 1024, 1280, 1536, 2048, 4096, 8192)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
TUNING_S = 90.0
_SAMPLE_WEIGHTS = 8  # of one shape: together more than the L2 cache holds


@dataclass(frozen=True, slots=True)
class _Part:
    """Weight shapes that a lane multiplies on its shares, at some numbers of rows."""

    shapes: tuple[Shape, ...]
    buckets: Sequence[int]
    shares: dict[int, Place]


def choose_products(
    model: Decoder, manager: PartitionManager, max_rows: int, graph_tokens: int, scratch: MatmulScratch
) -> ChoiceTable:
    """The table for a model's projections, completed and saved; all kernels it may choose are compiled and loaded.

    `max_rows`: most rows of a decode step; up to `graph_tokens` rows a product may need a captured graph.
    """
    projections: dict[Shape, list[Weight]] = model.projections
    head = model.head_shape
    layers = tuple(shape for shape in projections if shape != head or len(projections[shape]) > 1)
    weights = {shape: _sample(found, shape == head) for shape, found in projections.items()}
    lattice = manager.lattice
    key = TableKey.of(torch.cuda.get_device_name(manager.device), lattice.total_sms, str(model.dtype))
    path = default_path(key)
    table = ChoiceTable.load(path, key) or ChoiceTable(key)
    rows = tuple(bucket for bucket in ROW_BUCKETS if bucket < 2 * max_rows)
    memory = torch.randn(LOAD_ELEMENTS, device=manager.device).to(torch.bfloat16)
    prefill, decode = (_places(manager, lane, memory) for lane in (Lane.PREFILL, Lane.DECODE))
    for part in (
        _Part((*layers, head), rows, decode),
        _Part((head,), rows, prefill),
        _Part(layers, LAYER_BUCKETS, prefill),
    ):
        before = len(list(table))
        _complete(table, part, weights, head, model.dtype, scratch, graph_tokens)
        if len(list(table)) > before:
            table.save(path)
    warm(table, {shape: found[0] for shape, found in weights.items()}, model.dtype, scratch, (head,))
    return table


def _places(manager: PartitionManager, lane: Lane, memory: torch.Tensor) -> dict[int, Place]:
    """A lane's shares; beside each, on the rest of the SMs, what the other lane would do."""
    lattice = manager.lattice
    places: dict[int, Place] = {}
    for partition in lattice.partitions:
        sms, rest = partition.prefill_sms, partition.decode_sms
        if lane is Lane.DECODE:
            sms, rest = rest, sms
        beside = None
        if sms and rest and sms + rest <= lattice.total_sms:
            other = Lane.DECODE if lane is Lane.PREFILL else Lane.PREFILL
            kind: Kind = "reads" if other is Lane.DECODE else "multiplies"
            beside = Neighbour(kind, manager.stream(other, rest), rest, memory)
        if sms:
            places[sms] = Place(manager.stream(lane, sms), beside)
    return places


def _complete(
    table: ChoiceTable,
    part: _Part,
    weights: dict[Shape, list[Weight]],
    head: Shape,
    dtype: torch.dtype,
    scratch: MatmulScratch,
    graph_tokens: int,
) -> None:
    for shape in dict.fromkeys(part.shapes):
        known = table.cells.get(shape, {})
        missing = {sms: place for sms, place in part.shares.items() if not set(part.buckets) <= set(known.get(sms, ()))}
        if not missing:
            continue
        _log.info("measuring products with a %s weight on %s SMs", shape, sorted(missing))
        float_out = (shape,) if shape == head else ()
        measured = tune(
            {shape: weights[shape]}, part.buckets, missing, dtype, scratch, TUNING_S, graph_tokens, float_out
        )
        table.merge(measured)


def _sample(found: list[Weight], is_head: bool) -> list[Weight]:
    """A few of the layers' weights, spread; of the head's shape, the head itself."""
    if is_head:
        return found[-1:]
    found = [weight for weight in found if weight.gated == found[0].gated]
    return found[:: max(1, len(found) // _SAMPLE_WEIGHTS)][:_SAMPLE_WEIGHTS]
