"""A calibration: the fitted constants of one device, and where they come from. A JSON document.

Knows nothing about forecasts or fits. Without a calibration of one's own there is the datasheet: published peaks with
the efficiencies that our kernels reached where we measured, good for orders of magnitude and marked as such.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import NamedTuple

from bulletserve.cache_files import write_whole
from bulletserve.core.errors import ConfigError
from bulletserve.core.json_text import parse_json
from bulletserve.core.partition import MOST_SMS
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.parameters import Parameters, is_count, is_number

FORMAT = 3
"""1 had constants of contention that meant something else."""

NOT_ALL = "not all was measured"
"""What the note of a calibration says whose samples are of a run that was cut short, followed by why."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the numbers come from. `source`: "measured", "datasheet" or "synthetic". `dtype`: of weights and cache.
    `note`: what the rest does not say of the samples ("": all of one run).

    `holdout_errors`: by group of samples ("alone", "mixed", "side by side", "power"), name to value, such as
    {"alone": {"median": 0.03, "p90": 0.08, "count": 12}}; of samples that the fit has not seen.
    """

    source: str
    driver: str = ""
    torch: str = ""
    commit: str = ""
    date: str = ""
    samples: int = 0
    shape: ModelShape | None = None
    dtype: str = ""
    note: str = ""
    holdout_errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether all was measured that was planned."""
        return NOT_ALL not in self.note


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of one device of `total_sms` SMs (or CPU threads)."""

    device: str
    total_sms: int
    parameters: Parameters
    provenance: Provenance

    @property
    def hash(self) -> str:
        """Sixteen hex digits that name these constants, for records of decisions."""
        plain = json.dumps([self.device, self.total_sms, asdict(self.parameters)], sort_keys=True)
        return sha256(plain.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """One JSON document."""
        document = {"format": FORMAT} | asdict(self)
        if self.parameters.power_cap_w == inf:
            document["parameters"]["power_cap_w"] = None
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Calibration":
        """What `to_json` wrote. Raises `ConfigError` if it is none, or of a format that we do not know."""
        try:
            document = parse_json(text)
            if document["format"] != FORMAT:
                raise ConfigError(
                    f"a calibration of format {document['format']}, this version reads {FORMAT}: measure again, "
                    "or fit the samples beside it with bullet calibrate --from"
                )
            numbers, origin = document["parameters"], document["provenance"]
            if numbers["power_cap_w"] is None:
                numbers["power_cap_w"] = inf
            shape = None if origin["shape"] is None else ModelShape.from_json(origin["shape"])
            total_sms = document["total_sms"]
            if not (is_count(total_sms) and 1 <= total_sms <= MOST_SMS):
                raise ValueError(f"no device has {total_sms!r} SMs")
            return cls(
                device=str(document["device"]),
                total_sms=total_sms,
                parameters=Parameters(**numbers),
                provenance=_checked(Provenance(**(origin | {"shape": shape}))),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(f"this is no calibration: {error!r}") from error

    def save(self, path: Path) -> None:
        """Write it to `path` in one step."""
        write_whole(path, self.to_json())


def load(path: Path) -> Calibration:
    """The calibration in a file. Raises `ConfigError` where there is none."""
    try:
        return Calibration.from_json(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read a calibration from {path}: {error}") from error


def _checked(origin: Provenance) -> Provenance:
    for one in fields(Provenance):
        if one.type is str and not isinstance(getattr(origin, one.name), str):
            raise ValueError(f"{one.name} is no text")
    if not is_count(origin.samples):
        raise ValueError(f"samples is {origin.samples!r}: it must be a whole number from 0")
    for group, errors in origin.holdout_errors.items():
        for name, error in errors.items():
            if not is_number(error) or not 0 <= error < inf:
                raise ValueError(f"holdout_errors: {name} of {group} is {error!r}: it must be a number from 0")
    return origin


class _Datasheet(NamedTuple):
    """Published peaks: SMs, dense bf16 TFLOP/s, TB/s, W, and the boost clock in MHz to which the TFLOP/s belong."""

    sms: int
    tflops: float
    tb_s: float
    watts: float
    mhz: float


_DATASHEETS = {
    "B200": _Datasheet(148, 2250.0, 8.0, 1000.0, 1965.0),
    "H200": _Datasheet(132, 989.4, 4.8, 700.0, 1830.0),
    "H100 PCIe": _Datasheet(114, 756.0, 2.0, 350.0, 1755.0),
    "H100": _Datasheet(132, 989.4, 3.35, 700.0, 1830.0),
    "A100-SXM4-40GB": _Datasheet(108, 312.0, 1.555, 400.0, 1410.0),
    "A100-PCIE-40GB": _Datasheet(108, 312.0, 1.555, 250.0, 1410.0),
    "A100 80GB PCIe": _Datasheet(108, 312.0, 1.935, 300.0, 1410.0),
    "A100": _Datasheet(108, 312.0, 2.039, 400.0, 1410.0),
    "L40S": _Datasheet(142, 362.0, 0.864, 350.0, 2520.0),
    "L4": _Datasheet(58, 121.0, 0.3, 72.0, 2040.0),
}
"""Public datasheets, by a part of the name that the driver gives. The first that fits counts."""

_COMPUTE, _ATTENTION, _BANDWIDTH = 0.80, 0.60, 0.90
"""Shares of the peaks that kernels reach."""

_STREAM, _DECODE_ATTENTION = 0.50, 0.33
"""Shares of the clock-bound 64 bytes a cycle between an SM and L2 that loads reach."""

_BYTES_PER_CYCLE = 64
_STATIC, _MEMORY, _COMPUTING = 0.20, 0.55, 1.0
"""Shares of the power limit: idle with clocks up, the memory at its peak rate, products at the peak rate."""


def datasheet(device_name: str, total_sms: int) -> Calibration | None:
    """Constants from published peaks, or None for a device that is not listed.

    `device_name` as the driver gives it; `total_sms` as granted, where a part of a card counts as its share.
    """
    words = device_name.replace("_", " ").replace("-", " ").split()
    for name, sheet in _DATASHEETS.items():
        if set(name.replace("-", " ").split()) <= set(words):
            share = total_sms / sheet.sms
            return Calibration(device_name, total_sms, _peaks(sheet, share), Provenance("datasheet"))
    return None


def ordinary_cpu(device_name: str, threads: int) -> Calibration:
    """Constants of a server's CPU of these years, for one that could not be measured: right to a factor.

    Two cores of a Zen 4 with AVX-512 do 165 GFLOP/s each in prefill and read 7 GB/s each in decode.
    """
    constants = Parameters(
        matmul_flops=1e11,
        attention_flops=3e10,
        stream_bytes=7e9,
        attention_bytes=4e9,
        device_bytes=max(2e10, 4e9 * threads),
        layer_s=100e-6,
        tail_s=500e-6,
    )
    return Calibration(device_name, threads, constants, Provenance("datasheet"))


def _peaks(sheet: _Datasheet, share: float) -> Parameters:
    per_sm = sheet.tflops * 1e12 / sheet.sms
    device_bytes, cycle_bytes = sheet.tb_s * 1e12, _BYTES_PER_CYCLE * sheet.mhz * 1e6
    stream = max(_STREAM * cycle_bytes, 1.2 * device_bytes / sheet.sms)
    whole = Parameters(
        matmul_flops=_COMPUTE * per_sm,
        attention_flops=_ATTENTION * per_sm,
        stream_bytes=stream,
        attention_bytes=stream * _DECODE_ATTENTION / _STREAM,
        device_bytes=_BANDWIDTH * device_bytes,
        static_w=_STATIC * sheet.watts,
        byte_j=_MEMORY * sheet.watts / device_bytes,
        flop_j=_COMPUTING * sheet.watts / (sheet.tflops * 1e12),
        power_cap_w=sheet.watts,
        top_clock_mhz=sheet.mhz,
    )
    if share == 1.0:
        return whole
    return replace(
        whole,
        device_bytes=whole.device_bytes * min(1.0, share),
        static_w=whole.static_w * min(1.0, share),
        power_cap_w=whole.power_cap_w * min(1.0, share),
    )
