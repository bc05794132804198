"""Proof of partitions: on which SMs did a stream's kernels really run?

Knows nothing about how a share is enforced. A small kernel notes the id of the SM under each of its programs. Each
program stays for a while and there are twice as many as the GPU can hold, so that the hardware has to use every SM it
may: with fewer, an SM that wakes up late may get none. For `bullet doctor` and tests, not beside traffic: it waits for
the whole GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from bulletserve.core.errors import ConfigError
from bulletserve.core.partition import Partition
from bulletserve.core.plan import Lane
from bulletserve.resources.manager import PartitionManager

_PROGRAMS_PER_SM = 2 * 32  # no SM so far holds more than 32 blocks at once
_STAY_NS = 50_000


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What was seen of one lane's stream in one partition.

    `ok`: exactly as many SMs as the share, and none of them the other lane's where the partition splits the GPU.
    `graph_sms_seen`: the SMs of a CUDA graph captured on this stream and replayed on one with another share.
    """

    partition: Partition
    lane: Lane
    sms_seen: frozenset[int]
    graph_sms_seen: frozenset[int]
    ok: bool

    @property
    def graph_keeps_sms(self) -> bool:
        """Whether the graph ran on the SMs of the stream it was captured on."""
        return self.graph_sms_seen == self.sms_seen


def probe(manager: PartitionManager) -> list[ProbeResult]:
    """Run the kernel on every stream of the lattice. Raises `ConfigError` without Triton."""
    kernel = _sm_id_kernel()
    with torch.cuda.device(manager.device):
        return [result for partition in manager.lattice.partitions for result in _probe(manager, partition, kernel)]


def _probe(manager: PartitionManager, partition: Partition, kernel: Any) -> list[ProbeResult]:
    total_sms = manager.lattice.total_sms
    shares = {Lane.PREFILL: partition.prefill_sms, Lane.DECODE: partition.decode_sms}
    sm_ids = torch.empty(total_sms * _PROGRAMS_PER_SM, dtype=torch.int32, device=manager.device)

    def launch() -> None:
        kernel[(len(sm_ids),)](sm_ids, _STAY_NS, num_warps=1)

    seen: dict[Lane, frozenset[int]] = {}
    seen_in_graph: dict[Lane, frozenset[int]] = {}
    for lane, sms in shares.items():
        if sms == 0:
            continue
        stream = manager.stream(lane, sms)
        seen[lane] = _sms_of(launch, stream, sm_ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            launch()
        seen_in_graph[lane] = _sms_of(graph.replay, _stream_with_another_share(manager, lane, sms), sm_ids)
    shared = seen[Lane.PREFILL] & seen[Lane.DECODE] if sum(shares.values()) <= total_sms and len(seen) == 2 else ()
    return [
        ProbeResult(partition, lane, seen[lane], seen_in_graph[lane], ok=len(seen[lane]) == shares[lane] and not shared)
        for lane in seen
    ]


def _sms_of(launch: Callable[[], object], stream: torch.cuda.Stream, sm_ids: torch.Tensor) -> frozenset[int]:
    """The SMs on which a launch of the kernel runs when it is put on a stream."""
    sm_ids.fill_(-1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()  # of a graph replayed on a share, the device's own synchronize does not see the end
    return frozenset(sm_ids.tolist())


def _stream_with_another_share(manager: PartitionManager, lane: Lane, sms: int) -> torch.cuda.Stream:
    """All SMs for a share of them, the lane's smallest share for all SMs."""
    lattice = manager.lattice
    if sms < lattice.total_sms:
        return manager.stream(lane, lattice.total_sms)
    return manager.stream(lane, min(lattice.prefill_shares if lane is Lane.PREFILL else lattice.decode_shares))


@cache
def _sm_id_kernel() -> Any:
    """The Triton kernel, made on first use: this module must be importable without Triton."""
    try:
        triton = import_module("triton")
        tl = import_module("triton.language")
        nvidia = import_module("triton.language.extra.cuda")
    except ImportError as error:
        raise ConfigError(f"the probe needs Triton ({error}): pip install 'bulletserve[cuda]'") from error

    def note_sm_ids(sm_ids, stay_ns):  # type: ignore[no-untyped-def]
        """sm_ids: int32 [programs]; each program stays for `stay_ns` nanoseconds."""
        began_ns = nvidia.globaltimer()
        now_ns = began_ns
        while now_ns - began_ns < stay_ns:
            now_ns = nvidia.globaltimer()
        tl.store(sm_ids + tl.program_id(0), nvidia.smid())

    return triton.jit(note_sm_ids)
