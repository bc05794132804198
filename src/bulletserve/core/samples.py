"""A measured step: what ran, on which share, beside what, how long it took and what the card drew meanwhile.

Knows nothing about how it was measured (`profiling`) or what is fitted to it (`estimator/fit`). The two meet here, and
in the JSON file that lies beside every calibration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import MOST_SMS, Partition


@dataclass(frozen=True, slots=True)
class Sample:
    """One step that was run again and again.

    `partition`: SMs of each lane while it ran; `(n, 0)` and `(0, n)` where it ran alone on n of them, all or a share. A
    mixed step has `(total, 0)`. `alongside` is what the other lane ran meanwhile on its share (None: nothing).
    `seconds`: from the start of one such step to the start of the next. `watts` and `clock_mhz` are means of the whole
    device over that time, None where there is no counter.
    """

    step: StepShape
    partition: Partition
    alongside: StepShape | None
    seconds: float
    watts: float | None = None
    clock_mhz: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        return {
            "step": _plain(self.step),
            "partition": [self.partition.prefill_sms, self.partition.decode_sms],
            "alongside": None if self.alongside is None else _plain(self.alongside),
            "seconds": self.seconds,
            "watts": self.watts,
            "clock_mhz": self.clock_mhz,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Sample":
        """The inverse of `to_json`. Raises `ValueError` where a field is missing or is not what it should be."""
        try:
            prefill_sms, decode_sms = (int(sms) for sms in document["partition"])
            if not (0 <= prefill_sms <= MOST_SMS and 0 <= decode_sms <= MOST_SMS and prefill_sms + decode_sms):
                raise ValueError(f"no device is split into {prefill_sms} and {decode_sms} SMs")
            beside = document["alongside"]
            return cls(
                step=_step(document["step"]),
                partition=Partition(prefill_sms, decode_sms),
                alongside=None if beside is None else _step(beside),
                seconds=_measured(document["seconds"]),
                watts=_optional(document.get("watts")),
                clock_mhz=_optional(document.get("clock_mhz")),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"this is no sample: {error!r}") from error


_LEAST, _MOST = 1e-9, 1e9
"""No step takes less seconds or more, no device draws less watts or more, no clock has less MHz or more."""


def _plain(step: StepShape) -> dict[str, int]:
    return step._asdict()


_MOST_COUNTED = 10**15
"""No step has more of anything: squares of tokens are counted, too."""


def _step(document: Mapping[str, Any]) -> StepShape:
    counts = [int(document[name]) for name in StepShape._fields]
    if not all(0 <= count <= _MOST_COUNTED for count in counts):
        raise ValueError(f"no step has counts of {counts}")
    return StepShape(*counts)


def _measured(value: Any) -> float:
    found = float(value)
    if not _LEAST <= found <= _MOST:  # one nan or infinity among them and so is all that is fitted
        raise ValueError(f"nothing measured is {found}")
    return found


def _optional(value: Any) -> float | None:
    return None if value is None else _measured(value)
