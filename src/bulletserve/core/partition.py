"""How a device's SMs (or CPU threads) are shared between the two lanes.

Knows nothing about how a share is enforced: `resources` does. A lattice holds only what the device granted.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

MOST_SMS = 1 << 16
"""More than any device has; numbers above are mistakes."""


class Partition(NamedTuple):
    """SMs of each lane while both run. 0 on one side: the other has the whole device."""

    prefill_sms: int
    decode_sms: int


@dataclass(frozen=True)
class Lattice:
    """The partitions a device really grants, all to one lane among them."""

    total_sms: int
    partitions: tuple[Partition, ...]

    @classmethod
    def of_splits(cls, total_sms: int, splits: tuple[Partition, ...]) -> "Lattice":
        """The given splits plus the two partitions that give one lane everything."""
        whole = (Partition(total_sms, 0), Partition(0, total_sms))
        return cls(total_sms, tuple(sorted({*splits, *whole})))

    @cached_property
    def splits(self) -> tuple[Partition, ...]:
        """The partitions in which both lanes have a share, by rising prefill share."""
        return tuple(p for p in sorted(self.partitions) if p.prefill_sms and p.decode_sms)

    @cached_property
    def is_shared(self) -> bool:
        """Whether both lanes have the whole device at once."""
        return Partition(self.total_sms, self.total_sms) in self.partitions

    @cached_property
    def prefill_shares(self) -> frozenset[int]:
        """Every share a prefill step may ask for."""
        return frozenset(p.prefill_sms for p in self.partitions if p.prefill_sms)

    @cached_property
    def decode_shares(self) -> frozenset[int]:
        """Every share a decode step may ask for."""
        return frozenset(p.decode_sms for p in self.partitions if p.decode_sms)

    def decode_beside(self, prefill_sms: int) -> int:
        """Decode's share where prefill has this one; the whole device if prefill has no such share beside another."""
        return next((p.decode_sms for p in self.splits if p.prefill_sms == prefill_sms), self.total_sms)

    def nearest_split(self, decode_fraction: float) -> Partition:
        """The split whose decode share is nearest to a fraction of the device; all to one if there is none."""
        if not self.splits:
            return Partition(self.total_sms, self.total_sms)
        return min(self.splits, key=lambda p: abs(p.decode_sms / self.total_sms - decode_fraction))
