"""The SMs of one GPU as something that can be handed out: a ready stream for every share of every lane.

Knows nothing about steps or why a share is chosen. All partitions are built at start, so that taking another one is
a dictionary look-up: no driver call, no synchronisation. Each split is a pair of green contexts (`green_context`), the
decode stream with the high priority; the two whole-device streams are plain ones. Streams of different splits overlap
on purpose: a lane changes its share at its own next boundary, for a moment both may hold the same SMs.

Where there are no green contexts, both lanes share all SMs and only the streams' priorities tell them apart.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from bulletserve.core.config import CUDA_TORCH
from bulletserve.core.errors import ConfigError, NoGreenContexts
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import Lane
from bulletserve.resources.green_context import SmPool, put_back, sm_pool, take_split

_log = logging.getLogger(__name__)

MOST_SPLITS = 8
_USUAL_TOTAL = 132
_USUAL_DECODE_SHARES = (16, 24, 32, 40, 48, 56, 64, 80)


class PartitionManager:
    """Streams for the partitions of GPU `device_index`.

    `decode_shares` are SM counts to ask for, at most eight; None takes the usual ones, scaled to the GPU. `lattice`
    holds what was granted, `mechanism` what enforces it. Raises `ConfigError` without a usable GPU or for shares that
    cannot be, `DeviceError` if the driver refuses.
    """

    def __init__(self, device_index: int = 0, decode_shares: Sequence[int] | None = None) -> None:
        _require_gpu(device_index)
        self.device = torch.device("cuda", device_index)
        self._owned = ExitStack()
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()  # makes the primary context, which green contexts then share
            prefill = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            _, self._high_priority = prefill.priority_range()
            decode = torch.cuda.Stream(self.device, self._high_priority)  # type: ignore[no-untyped-call]
            self._streams: dict[tuple[Lane, int], torch.cuda.Stream] = {}
            try:
                pool = sm_pool(device_index)
                splits = self._split(pool, decode_shares)
                total_sms = pool.total
                self.mechanism = "green contexts"
            except NoGreenContexts as why:
                _log.warning("the SMs of GPU %d are not split, both lanes share all of them: %s", device_index, why)
                total_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
                splits = (Partition(total_sms, total_sms),)
                self._streams.clear()
                self.mechanism = "stream priorities"
        self._streams |= {(Lane.PREFILL, total_sms): prefill, (Lane.DECODE, total_sms): decode}
        for stream in self._streams.values():  # each by itself: the device's synchronize misses graphs on shares
            self._owned.callback(stream.synchronize)
        self.lattice = Lattice.of_splits(total_sms, splits)

    def stream(self, lane: Lane, sms: int) -> torch.cuda.Stream:
        """The stream of a lane on a share out of the lattice; KeyError for any other, and after `close`."""
        return self._streams[lane, sms]

    def describe(self) -> str:
        """For people: how the SMs are shared, and the splits there are."""
        total_sms = self.lattice.total_sms
        if self.mechanism == "stream priorities":
            return f"stream priorities: both lanes share {total_sms} SMs, decode goes first"
        splits = ", ".join(f"{p.prefill_sms}+{p.decode_sms}" for p in self.lattice.splits)
        return f"green contexts on {total_sms} SMs\nprefill+decode: {splits}, or all to one lane"

    def close(self) -> None:
        """Wait for the GPU, then leave the splits to the next manager of this process. May be called twice."""
        self._streams.clear()
        self._owned.close()

    def _split(self, pool: SmPool, asked: Sequence[int] | None) -> tuple[Partition, ...]:
        """Build all splits and their streams; where one fails, those before it are put back."""
        splits: list[Partition] = []
        with ExitStack() as undo:
            for decode_sms in usual_shares(pool) if asked is None else _checked_shares(pool, asked):
                split = take_split(self.device.index, decode_sms, first_priority=self._high_priority, rest_priority=0)
                shares = {(Lane.PREFILL, split.rest.sms): split.rest, (Lane.DECODE, split.first.sms): split.first}
                undo.callback(put_back, split)
                if not self._streams.keys().isdisjoint(shares):
                    continue
                splits.append(Partition(split.rest.sms, split.first.sms))
                for key, share in shares.items():
                    self._streams[key] = _external_stream(share.stream, self.device)
            if not splits:
                raise NoGreenContexts(f"{pool.total} SMs in steps of {pool.step} are too few to split")
            self._owned = undo.pop_all()
        return tuple(splits)


def _external_stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]


def usual_shares(pool: SmPool) -> tuple[int, ...]:
    """The decode shares to ask for on a GPU, by rising size: multiples of its step that leave something beside them."""
    nearest = (round(share * pool.total / _USUAL_TOTAL / pool.step) * pool.step for share in _USUAL_DECODE_SHARES)
    shares = {max(share, _rounded_up(pool, 1)) for share in nearest}
    return tuple(sorted(share for share in shares if share < pool.total))


def _checked_shares(pool: SmPool, asked: Sequence[int]) -> Sequence[int]:
    if not 0 < len(asked) <= MOST_SPLITS:
        raise ConfigError(f"{len(asked)} decode shares asked for: give 1 to {MOST_SPLITS}")
    for share in asked:
        if share < 1 or _rounded_up(pool, share) >= pool.total:
            usual = ", ".join(map(str, usual_shares(pool)))
            raise ConfigError(
                f"a decode share of {share} SMs: this GPU has {pool.total} in steps of {pool.step}, of which prefill "
                f"needs some; choose for example from {usual}"
            )
    return asked


def _rounded_up(pool: SmPool, sms: int) -> int:
    """What the driver grants at least where `sms` are asked."""
    return -(-max(sms, pool.smallest) // pool.step) * pool.step


def _require_gpu(device_index: int) -> None:
    if not torch.version.cuda:
        raise ConfigError(f"torch {torch.__version__} is built without CUDA; to use an NVIDIA GPU: {CUDA_TORCH}")
    if not torch.cuda.is_available():
        raise ConfigError(
            "torch finds no NVIDIA GPU; nvidia-smi must list one (in a container: docker run --gpus all), or serve "
            "with --device cpu"
        )
    if not 0 <= device_index < torch.cuda.device_count():
        raise ConfigError(f"there is no GPU {device_index}: choose 0 to {torch.cuda.device_count() - 1}")
