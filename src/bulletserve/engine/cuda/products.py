"""Which matrix product runs where: a table for this GPU and model, read from the cache or measured at start.

Knows nothing about how a product is measured (`kernels/cuda/matmul_tuning`). Only what the table lacks is measured: a
new model of known shapes, or a second start, costs nothing.
"""

import logging
import time
from collections.abc import Sequence

import torch

from bulletserve.core.partition import Lattice
from bulletserve.core.plan import Lane
from bulletserve.kernels.cuda.matmul import MatmulScratch, Weight
from bulletserve.kernels.cuda.matmul_choice import ChoiceTable, TableKey, default_path
from bulletserve.kernels.cuda.matmul_tuning import Place, Shape, tune, warm
from bulletserve.kernels.cuda.neighbour import LOAD_ELEMENTS, Kind, Neighbour
from bulletserve.models.decoder import Decoder
from bulletserve.resources.manager import PartitionManager

_log = logging.getLogger(__name__)

LAYER_BUCKETS = (
    *(16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 576, 640, 768),
    *(896, 1024, 1280, 1536, 2048, 4096, 8192),
)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
DECODE_LOAD: Kind = "reads"
PREFILL_LOAD: Kind = "multiplies"
TUNING_S = 180.0
"""For all products of a model together; what is not measured by then is measured at the next start."""

_SAMPLE_WEIGHTS = 8  # of one shape: together more than the L2 cache holds


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
    wanted = [(Lane.DECODE, shape, rows) for shape in dict.fromkeys((*layers, head))]
    wanted += [(Lane.PREFILL, head, rows), *((Lane.PREFILL, shape, LAYER_BUCKETS) for shape in layers)]
    places: dict[tuple[Lane, int], Place] = {}
    ends_s = time.monotonic() + TUNING_S
    for done, (lane, shape, buckets) in enumerate(wanted):
        missing = _missing_shares(table, lattice, lane, shape, buckets)
        if not missing:
            continue
        places = places or _places(manager)
        budget_s = (ends_s - time.monotonic()) / (len(wanted) - done)
        _log.info("measuring products with a %s weight on %s SMs", shape, missing)
        shares = {sms: places[lane, sms] for sms in missing}
        few, float_out = {shape: weights[shape]}, (head,) if shape == head else ()
        table.merge(tune(few, buckets, shares, model.dtype, scratch, budget_s, graph_tokens, float_out))
        table.save(path)
    warm(table, {shape: found[0] for shape, found in weights.items()}, model.dtype, scratch, (head,))
    return table


def _missing_shares(
    table: ChoiceTable, lattice: Lattice, lane: Lane, shape: Shape, buckets: Sequence[int]
) -> list[int]:
    """Shares of a lane on which some bucket of a weight's shape was not measured."""
    known = table.cells.get(shape, {})
    granted = lattice.decode_shares if lane is Lane.DECODE else lattice.prefill_shares
    return sorted(sms for sms in granted if not set(buckets) <= set(known.get(sms, ())))


def _places(manager: PartitionManager) -> dict[tuple[Lane, int], Place]:
    """The shares of both lanes; beside each, on the rest of the SMs, what the other lane would do."""
    lattice = manager.lattice
    memory = torch.randn(LOAD_ELEMENTS, device=manager.device).to(torch.bfloat16)
    places: dict[tuple[Lane, int], Place] = {}
    for partition in lattice.partitions:
        prefill, decode = partition.prefill_sms, partition.decode_sms
        split = prefill > 0 and decode > 0 and prefill + decode <= lattice.total_sms
        for lane, sms, other, rest, kind in (
            (Lane.PREFILL, prefill, Lane.DECODE, decode, DECODE_LOAD),
            (Lane.DECODE, decode, Lane.PREFILL, prefill, PREFILL_LOAD),
        ):
            beside = Neighbour(kind, manager.stream(other, rest), rest, memory) if split else None
            if sms:
                places[lane, sms] = Place(manager.stream(lane, sms), beside)
    return places


def _sample(found: list[Weight], is_head: bool) -> list[Weight]:
    """A few of the layers' weights, spread; of the head's shape, the head itself."""
    if is_head:
        return found[-1:]
    found = [weight for weight in found if weight.gated == found[0].gated]
    return found[:: max(1, len(found) // _SAMPLE_WEIGHTS)][:_SAMPLE_WEIGHTS]
