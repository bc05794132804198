"""All that one calibration run measured, as the file that lies beside the calibration: enough to fit and judge again.

Knows nothing about how it was measured or what is fitted.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bulletserve.cache_files import write_whole
from bulletserve.core.errors import ConfigError
from bulletserve.core.json_text import parse_json
from bulletserve.core.samples import Sample
from bulletserve.core.shapes import ModelShape

FORMAT = 1
_WIDTHS = (1, 2, 4, 8)
"""Bytes that a number of a model may take."""


@dataclass(frozen=True)
class Measurements:
    """Samples of a model of `shape` whose numbers take `dtype_bytes` bytes.

    `device` holds the fields of `estimator.fit.DeviceFacts`. `fit` and `power` are fitted, `held_out` judges.
    `skipped`: points without a figure, in words, and why. `cut_short`: why not all that was planned was run ("": it
    was).
    """

    device: Mapping[str, Any]
    shape: ModelShape
    dtype_bytes: int
    fit: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    power: tuple[Sample, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    cut_short: str = ""

    @property
    def fitted(self) -> tuple[Sample, ...]:
        """What a fit may use."""
        return self.fit + self.power

    def save(self, path: Path) -> None:
        """Write them to `path` in one step."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "device": dict(self.device),
            "shape": asdict(self.shape),
            "dtype_bytes": self.dtype_bytes,
        }
        for name in ("fit", "held_out", "power"):
            document[name] = [sample.to_json() for sample in getattr(self, name)]
        document["skipped"] = [list(pair) for pair in self.skipped]
        document["cut_short"] = self.cut_short
        write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def load_measurements(path: Path) -> Measurements:
    """What `Measurements.save` wrote. Raises `ConfigError` where there is none."""
    try:
        document = parse_json(path.read_text())
        if document["format"] != FORMAT:
            raise ConfigError(f"{path} holds samples of format {document['format']}, this version reads {FORMAT}")
        fit, held_out, power = (tuple(map(Sample.from_json, document[name])) for name in ("fit", "held_out", "power"))
        return Measurements(
            device=dict(document["device"]),
            shape=ModelShape.from_json(document["shape"]),
            dtype_bytes=_checked_bytes(document["dtype_bytes"]),
            fit=fit,
            held_out=held_out,
            power=power,
            skipped=tuple((str(what), str(why)) for what, why in document["skipped"]),
            cut_short=str(document.get("cut_short", "")),
        )
    except OSError as error:
        raise ConfigError(f"the samples behind the calibration should lie in {path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{path} holds no samples: {error!r}") from error


def _checked_bytes(value: Any) -> int:
    if type(value) is not int or value not in _WIDTHS:
        raise ValueError(f"dtype_bytes is {value!r}: it must be one of {', '.join(map(str, _WIDTHS))}")
    return value
