"""Where calibrations lie and which one fits a device and a model: measured here, shipped with us, or a datasheet.

Knows nothing about forecasts. The user's own cache comes first, then what the package ships, then published peaks; in
each, the model's own shape before the nearest other one, because most constants are the device's.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict
from math import inf, log
from pathlib import Path

from bulletserve.cache_files import cache_root
from bulletserve.core.errors import ConfigError
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.calibration import Calibration, datasheet, load

_log = logging.getLogger(__name__)

PACKAGED = Path(__file__).parent / "data" / "calibrations"
SAMPLES_SUFFIX = ".samples.json"


def cache_folder() -> Path:
    """Where `bullet calibrate` writes: $XDG_CACHE_HOME/bulletserve/calibrations or ~/.cache/..."""
    return cache_root() / "calibrations"


def default_path(device: str, total_sms: int, shape: ModelShape) -> Path:
    """The file of a device of `total_sms` SMs (or threads) and a model shape."""
    plain = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return cache_folder() / f"{plain}-{total_sms}-{shape_hash(shape)}.json"


def samples_path(path: Path) -> Path:
    """Where the samples behind a calibration lie: beside it."""
    return path.with_name(path.name.removesuffix(".json") + SAMPLES_SUFFIX)


def shape_hash(shape: ModelShape) -> str:
    """Twelve hex digits of everything that decides how much work a step is."""
    plain = json.dumps(asdict(shape), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:12]


def find_calibration(device: str, total_sms: int, shape: ModelShape) -> tuple[Calibration | None, str]:
    """The calibration to go by, and in words where it is from and what is wrong with it.

    `device` and `total_sms` as in `Calibration`. None where nothing is known of the device. A file that cannot be read
    is passed over with a warning.
    """
    for folder, whose in ((cache_folder(), "measured on this machine"), (PACKAGED, "shipped with bulletserve")):
        fitting = list(_of_device(folder, device, total_sms))
        for path, one in fitting:
            if one.provenance.shape is not None and shape_hash(one.provenance.shape) == shape_hash(shape):
                return one, f"{whose} for this model ({path})"
        if fitting:
            path, one = min(fitting, key=lambda found: _distance(found[1], shape))
            return one, f"{whose} with another model ({path}); for this one run: bullet calibrate MODEL"
    known = datasheet(device, total_sms)
    if known is not None:
        return known, f"published peaks of {device}: times may be far off; measure them with: bullet calibrate MODEL"
    return None, f"none for {device}, and no datasheet lists it; make one with: bullet calibrate MODEL"


def _of_device(folder: Path, device: str, total_sms: int) -> Iterator[tuple[Path, Calibration]]:
    """The folder's calibrations of a device, newest first."""
    found: list[tuple[Path, Calibration]] = []
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(SAMPLES_SUFFIX):
            continue
        try:
            one = load(path)
        except ConfigError as error:
            _log.warning("%s: %s", path, error)
            continue
        if (one.device, one.total_sms) == (device, total_sms):
            found.append((path, one))
    yield from sorted(found, key=lambda pair: pair[1].provenance.date, reverse=True)


def _distance(calibration: Calibration, shape: ModelShape) -> float:
    """How far the shape it was measured with is from `shape`: the ratio of their parameters, as a logarithm."""
    other = calibration.provenance.shape
    return inf if other is None else abs(log(other.parameters / shape.parameters))
